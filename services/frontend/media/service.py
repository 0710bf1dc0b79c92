"""MediaService: serves the pixels of media items to workers that a scheduler has sent."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import grpc.aio

from quire.services.frontend.media.store import MediaStore
from quire.services.frontend.media.tiles import MediaTiles
from quire.shared.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError, transport
from quire.shared.pb.frontend.v1 import media_pb2 as pb
from quire.shared.pb.frontend.v1 import media_pb2_grpc
from quire.shared.rpc.parts import MAX_PART_BYTES
from quire.shared.rpc.timed_messages import read_message, write_message
from quire.shared.rpc.trust import HandshakeAcceptor

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["MediaService"].full_name
PART_BYTES = min(1 << 20, MAX_PART_BYTES)
IDENTIFIER_BYTES = 32
MAX_SERVED = 16  # callers that get pixels at the same time; further ones wait
REQUEST_TIMEOUT_S = 5.0  # from the start of a call to its request
WRITE_TIMEOUT_S = 30.0  # for a caller to read one part

Context = grpc.aio.ServicerContext[pb.FetchMediaRequest, pb.FetchMediaResponse]


class MediaService(media_pb2_grpc.MediaServiceServicer):
    """Serves the items of a store, with a bounded number of parts in transit."""

    def __init__(self, acceptor: HandshakeAcceptor, store: MediaStore) -> None:
        self._acceptor, self._store = acceptor, store
        self._semaphore = asyncio.Semaphore(MAX_SERVED)

    async def FetchMedia(self, _requests: object, context: Context) -> None:
        """Authenticates the caller, and sends the pixels of the item that it asks for, part by part as it reads them. A
        QuireError ends the call with its gRPC code."""
        try:
            await self._acceptor.authenticate(context, pb.FetchMediaResponse, SERVICE_NAME)
            identifier = self._identifier(await read_message(context, REQUEST_TIMEOUT_S, "no request was received"))
            async with self._semaphore:
                tiles = self._store.find(identifier)
                if tiles is None:
                    raise NotFound(f"this frontend does not keep the media item {identifier.hex()}", field="identifier")
                await _send(context, tiles)
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)

    def _identifier(self, message: Any) -> bytes:
        """Returns the identifier in a call's first message. Raises FailedPrecondition for another message,
        InvalidArgument for an identifier of another length."""
        kind = None if message is grpc.aio.EOF else message.WhichOneof("message")
        if kind != "media":
            raise self._acceptor.unexpected_handshake(kind) or FailedPrecondition(
                f"the first message of a call must be media, got {kind or 'none'}"
            )
        identifier: bytes = message.media.identifier
        if len(identifier) != IDENTIFIER_BYTES:
            text = f"identifier has {len(identifier)} bytes; {IDENTIFIER_BYTES} are needed"
            raise InvalidArgument(text, field="identifier")
        return identifier


async def _send(context: Context, tiles: MediaTiles) -> None:
    """Sends the head and the parts. Raises DeadlineExceeded if the caller does not read one in time."""
    checksum = await asyncio.to_thread(zlib.crc32, tiles.pixels)
    layout = tiles.layout
    element = pb.TILE_ELEMENT_FLOAT32 if layout.is_sound else pb.TILE_ELEMENT_UNSPECIFIED
    size = {"num_tiles": layout.num_tiles, "height": layout.height, "width": layout.width}
    head = pb.PixelsHead(**size, checksum=checksum, element=element)
    await _write(context, pb.FetchMediaResponse(head=head))
    for start in range(0, len(tiles.pixels), PART_BYTES):
        await _write(context, pb.FetchMediaResponse(part=tiles.pixels[start : start + PART_BYTES]))


async def _write(context: Context, message: pb.FetchMediaResponse) -> None:
    """Sends a message, within a time, because the caller occupies one of MAX_SERVED slots."""
    await write_message(context, message, WRITE_TIMEOUT_S, "the caller did not read a part")
