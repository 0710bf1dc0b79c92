"""Fetches pixels from the media services of frontends (quire/frontend/v1/media.proto). Addresses, sizes, times
and checksums are checked."""

from __future__ import annotations

import asyncio
import re

import grpc
import grpc.aio

from quire.services.worker.media.download import Download, DownloadBounds
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


# a video of 32 frames of 1280 x 720 pixels has 88 MB
BOUNDS = DownloadBounds(max_bytes=256 << 20, first_part_timeout_s=10.0)


class _Unreachable(Unavailable):
    """The service could not be reached, or the call ended early; another attempt may succeed."""


class GrpcPixels:
    """PixelSource over gRPC, mutually authenticated if there is a cluster secret."""

    def __init__(self, dialler: Dialler, bounds: DownloadBounds = BOUNDS) -> None:
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
            download = Download(call, self._bounds, f"the frontend at {address}", "pixels")
            try:
                async with asyncio.timeout(self._bounds.first_part_timeout_s):
                    await self._request(call, identifier, address)
                    head: pb.PixelsHead = await download.head()
                layout = self._checked(head, address)
                pixels = await download.receive(layout.num_bytes, head.checksum)
                return pixels.view(layout.dtype).reshape(layout.shape)
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

    def _checked(self, head: pb.PixelsHead, address: str) -> TileLayout:
        """Returns the layout that `head` announces. Raises Unavailable for an unknown element, and for no or too many
        bytes."""
        layout, most = _layout(head, address), self._bounds.max_bytes
        if not 0 < layout.num_bytes <= most:
            text = f"{head.num_tiles} x {head.height} x {head.width} pixels, {layout.num_bytes} bytes of at most {most}"
            raise Unavailable(f"the frontend at {address} announced {text}")
        return layout


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
