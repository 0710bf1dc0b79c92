"""The gRPC port at which workers fetch pixels. It is open only if the model takes pictures."""

from __future__ import annotations

import socket

from quire.services.frontend.media.service import SERVICE_NAME, MediaService
from quire.services.frontend.media.store import MediaStore
from quire.shared.pb.frontend.v1 import media_pb2_grpc
from quire.shared.rpc.server import Server
from quire.shared.rpc.trust import HandshakeAcceptor
from quire.shared.settings.base import LOOPBACK
from quire.shared.settings.frontend import FrontendSettings

LOCAL = "127.0.0.1"
EVERYWHERE = frozenset({"0.0.0.0", "::"})


class MediaPort:
    """Owns the server of the MediaService."""

    def __init__(self, settings: FrontendSettings, store: MediaStore | None) -> None:
        """Binds the port; without a store nothing is opened."""
        self._server: Server | None = None
        self.address = ""  # as workers reach it; empty: not open
        if store is None:
            return
        host = _host(settings)
        server = Server(host, settings.media_port, (SERVICE_NAME,), tls=settings.tls, port_setting="media_port")
        acceptor = HandshakeAcceptor(settings.cluster_secret(), settings.title)
        media_pb2_grpc.add_MediaServiceServicer_to_server(MediaService(acceptor, store), server.methods)
        self._server = server
        self.address = acceptor.address = f"{_reachable(settings, host)}:{server.port}"

    async def start(self) -> None:
        """Starts to serve."""
        if self._server is not None:
            await self._server.start()
            await self._server.set_serving(True)

    async def stop(self) -> None:
        """Ends all calls."""
        if self._server is not None:
            await self._server.stop(0)


def _host(settings: FrontendSettings) -> str:
    """Returns the address to listen on: media_host, or by default `host`, but this machine only where callers from
    others could not be authenticated."""
    if settings.media_host:
        return settings.media_host
    is_safe = settings.cluster_secret_file or settings.tls.is_mutual or settings.insecure
    return settings.host if is_safe or settings.host in LOOPBACK else LOCAL


def _reachable(settings: FrontendSettings, host: str) -> str:
    """Returns the host name under which workers reach the port."""
    if host in LOOPBACK:
        return host
    return settings.advertise or (socket.gethostname() if host in EVERYWHERE else host)
