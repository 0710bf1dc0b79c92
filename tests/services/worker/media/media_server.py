"""A media service over real gRPC that keeps pixels, and does what a test scripts."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from quire.services.worker.media.grpc_pixels import SERVICE_NAME
from quire.services.worker.step.fetched_item import Pixels
from quire.shared.errors import QuireError, transport
from quire.shared.pb.frontend.v1 import media_pb2 as pb
from quire.shared.pb.frontend.v1 import media_pb2_grpc
from quire.shared.rpc.server import Server
from quire.shared.rpc.trust import HandshakeAcceptor
from tests.services.worker.media.pictures import identifier_of

Context = grpc.aio.ServicerContext
Answer = Callable[[Pixels, Context], AsyncIterator[pb.FetchMediaResponse]]
PART_BYTES = 1000


def head_of(pixels: Pixels, **changes: int) -> pb.FetchMediaResponse:
    tiles, height, width, _ = pixels.shape
    values = {"num_tiles": tiles, "height": height, "width": width, "checksum": zlib.crc32(pixels.tobytes())}
    return pb.FetchMediaResponse(head=pb.PixelsHead(**(values | changes)))


def parts_of(pixels: Pixels) -> list[pb.FetchMediaResponse]:
    data = pixels.tobytes()
    return [pb.FetchMediaResponse(part=data[at : at + PART_BYTES]) for at in range(0, len(data), PART_BYTES)]


async def honest(pixels: Pixels, context: Context) -> AsyncIterator[pb.FetchMediaResponse]:
    yield head_of(pixels)
    for part in parts_of(pixels):
        yield part


class MediaServer(media_pb2_grpc.MediaServiceServicer):
    """Keeps pictures by identifier; `answers` are used one after the other, the last one for all further calls."""

    def __init__(self, *pictures: Pixels, door: HandshakeAcceptor | None = None) -> None:
        self.pictures = {identifier_of(pixels): pixels for pixels in pictures}
        self.answers: list[Answer] = [honest]
        self.num_calls = 0
        self.door = door

    async def FetchMedia(self, _requests: object, context: Context) -> None:
        self.num_calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if self.door is not None:
            try:
                await self.door.authenticate(context, pb.FetchMediaResponse, SERVICE_NAME)
            except QuireError as error:
                await context.abort(transport(error).grpc_code, error.message)
        request = await context.read()
        if request.WhichOneof("message") != "media":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "there is no cluster secret here")
        pixels = self.pictures.get(request.media.identifier)
        if pixels is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such item")
        assert pixels is not None
        async for message in answer(pixels, context):
            await context.write(message)


@asynccontextmanager
async def serving(servicer: MediaServer, port: int = 0) -> AsyncIterator[str]:
    server = Server("127.0.0.1", port, (SERVICE_NAME,))
    media_pb2_grpc.add_MediaServiceServicer_to_server(servicer, server.methods)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    if servicer.door is not None:
        servicer.door.address = address
    yield address
    await server.stop(0)
