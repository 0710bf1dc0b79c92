"""Fetches pixels from the media services of frontends (quire/frontend/v1/media.proto). Addresses, sizes, times
and checksums are checked."""

from __future__ import annotations

import asyncio
import re
import zlib
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np

from quire.services.worker.step.fetched_item import Pixels
from quire.shared.errors import InvalidArgument, NotFound, QuireError, Unauthenticated, Unavailable
from quire.shared.media.processor import TileLayout
from quire.shared.pb.frontend.v1 import media_pb2 as pb
from quire.shared.pb.frontend.v1 import media_pb2_grpc
from quire.shared.process.supervision import is_cancel_requested
from quire.shared.rpc.connection_cache import ConnectionCache
from quire.shared.rpc.trust import Dialler

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["MediaService"].full_name
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
# Words before the colon that gRPC reads as the scheme of a target, not as a host name.
SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds"})
Call = grpc.aio.StreamStreamCall[pb.FetchMediaRequest, pb.FetchMediaResponse]


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Limits of one fetch."""

    max_bytes: int = 256 << 20  # a video of 32 frames of 1280 x 720 pixels has 88 MB
    first_part_timeout_s: float = 10.0
    next_part_timeout_s: float = 5.0
    min_bytes_per_s: int = 4 << 20  # of a whole fetch: bounds the time of a service that sends little at a time


BOUNDS = PixelBounds()


class _Unreachable(Unavailable):
    """The service could not be reached, or the call ended early; another attempt may succeed."""


class GrpcPixels:
    """PixelSource over gRPC, mutually authenticated if there is a cluster secret."""

    def __init__(self, dialler: Dialler, bounds: PixelBounds = BOUNDS) -> None:
        self._dialler, self._bounds = dialler, bounds
        self._connections = ConnectionCache(dialler)

    async def fetch(self, identifier: bytes, address: str) -> Pixels:
        """Returns the pixels of an item, with one more attempt if the service cannot be reached. Raises InvalidArgument
        for an address that is not HOST:PORT, NotFound, Unauthenticated and Unavailable."""
        _check_address(address)
        try:
            return await self._fetch(identifier, address)
        except _Unreachable:
            return await self._fetch(identifier, address)

    async def close(self) -> None:
        """Closes all connections, which cancels their calls."""
        await self._connections.close()

    async def _fetch(self, identifier: bytes, address: str) -> Pixels:
        """Fetches pixels in one call. Raises _Unreachable if the connection fails; other errors as fetch()."""
        async with self._connections.connected(address) as connection:
            call: Call = media_pb2_grpc.MediaServiceStub(connection.channel).FetchMedia()
            try:
                async with asyncio.timeout(self._bounds.first_part_timeout_s):
                    await self._request(call, identifier, address)
                    head = await _head(call, address)
                return await self._receive(call, head, address)
            except TimeoutError:
                self._connections.evict(address, connection)
                raise Unavailable(f"the frontend at {address} did not send the pixels in time") from None
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    self._connections.evict(address, connection)
                raise _as_quire_error(error, address) from None
            except (asyncio.InvalidStateError, grpc.aio.InternalError):  # the call ended before its request was sent
                raise _Unreachable(f"the call to the frontend at {address} ended while the request was sent") from None
            except asyncio.CancelledError:
                if is_cancel_requested():
                    raise
                raise _Unreachable(f"the call to the frontend at {address} was cancelled on this side") from None
            finally:
                call.cancel()

    async def _request(self, call: Call, identifier: bytes, address: str) -> None:
        """Authenticates the call and asks for an item."""
        await self._dialler.handshake(call, pb.FetchMediaRequest, SERVICE_NAME, address, known=False)
        await call.write(pb.FetchMediaRequest(media=pb.MediaRequest(identifier=identifier)))
        await call.done_writing()

    async def _receive(self, call: Call, head: pb.PixelsHead, address: str) -> Pixels:
        """Returns the pixels that `head` describes. Raises Unavailable for other sizes than it states, too many bytes,
        and a wrong checksum; TimeoutError if a part or the whole is late."""
        bounds, layout = self._bounds, _layout(head, address)
        size = layout.num_bytes
        if not 0 < size <= bounds.max_bytes:
            text = f"{head.num_tiles} x {head.height} x {head.width} pixels, {size} bytes of at most {bounds.max_bytes}"
            raise Unavailable(f"the frontend at {address} announced {text}")
        pixels, received = np.empty(size, dtype=np.uint8), 0
        async with asyncio.timeout(bounds.first_part_timeout_s + size / bounds.min_bytes_per_s):
            while (part := await self._part(call, address)) is not None:
                if not part or received + len(part) > size:
                    raise Unavailable(f"the frontend at {address} sent {received + len(part)} of {size} bytes")
                pixels[received : received + len(part)] = np.frombuffer(part, dtype=np.uint8)
                received += len(part)
        if received != size:
            raise Unavailable(f"the frontend at {address} sent {received} of {size} bytes")
        if await asyncio.to_thread(zlib.crc32, pixels.data) != head.checksum:
            raise Unavailable(f"the pixels of the frontend at {address} do not match their checksum")
        return pixels.view(layout.dtype).reshape(layout.shape)

    async def _part(self, call: Call, address: str) -> bytes | None:
        """Returns the next bytes; None at the end. Raises Unavailable for other messages, TimeoutError if it is
        late."""
        async with asyncio.timeout(self._bounds.next_part_timeout_s):
            message: Any = await call.read()
        if message is grpc.aio.EOF:
            return None
        if message.WhichOneof("message") != "part":
            text = f"sent {message.WhichOneof('message')} instead of bytes of pixels"
            raise Unavailable(f"the frontend at {address} {text}")
        part: bytes = message.part
        return part


async def _head(call: Call, address: str) -> pb.PixelsHead:
    """Returns the first message of an answer. Raises Unavailable for any other."""
    message: Any = await call.read()
    kind = "nothing" if message is grpc.aio.EOF else message.WhichOneof("message")
    if kind != "head":
        raise Unavailable(f"the frontend at {address} sent {kind} instead of the size of the pixels")
    head: pb.PixelsHead = message.head
    return head


def _layout(head: pb.PixelsHead, address: str) -> TileLayout:
    """Returns the layout that a head announces. Raises Unavailable for contents that this version does not know."""
    if head.element not in (pb.TILE_ELEMENT_UNSPECIFIED, pb.TILE_ELEMENT_FLOAT32):
        raise Unavailable(f"the frontend at {address} announced elements of type {head.element}, which are not known")
    is_sound = head.element == pb.TILE_ELEMENT_FLOAT32
    return TileLayout(head.num_tiles, head.height, head.width, is_sound=is_sound)


def _check_address(address: str) -> None:
    """Raises InvalidArgument unless the address is HOST:PORT."""
    found = ADDRESS.fullmatch(address)
    if found is None or found[1].lower() in SCHEMES or not 0 < int(found[2]) <= 65535:
        raise InvalidArgument(f"address: {address[:80]!r} is not HOST:PORT of a frontend", field="address")


def _as_quire_error(error: grpc.aio.AioRpcError, address: str) -> QuireError:
    """Returns the error of a call that the frontend, or the connection to it, has ended."""
    text = f"the frontend at {address}: {error.details()}"
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(text)
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Unauthenticated(text)
        case grpc.StatusCode.UNAVAILABLE:
            return _Unreachable(text)
    return Unavailable(text)
