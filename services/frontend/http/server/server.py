"""HTTP server on the service's event loop: uvicorn without its signal handlers, on a socket bound here."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from quire.services.frontend.http.server.connection_limiter import ConnectionLimiter
from quire.services.frontend.http.server.protocol import AdmissionHooks, protocol_class
from quire.services.frontend.http.server.tls_listener import TlsListener
from quire.shared import ports
from quire.shared.security.tls import server_context
from quire.shared.security.tls_files import Tls

MOST_MESSAGE_BYTES = 4 << 20  # of a WebSocket: a minute and a half of PCM16 at 16 kHz in base64
# Backlog of connections to be accepted; a client beyond it retries after a second. The system's limit
# (net.core.somaxconn) is usually 4096.
QUEUE = 65_535
# asyncio accepts up to the backlog in one go. A small value lets the event loop run other tasks in between: refusals of
# earlier calls, tokens of streams.
ACCEPTED_AT_ONCE = 64


class HttpApplication(NamedTuple):
    """An application, and the hooks that decide on a call before it begins."""

    app: ASGIApp
    admission_hooks: AdmissionHooks
    inner: ASGIApp  # for calls of batches, which have neither connection nor API key


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, with TLS by a TlsListener if given; SIGTERM is handled by quire.shared.process.lifecycle."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.tls_listener: TlsListener | None = None  # set under TLS

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts serving, through the TLS listener if there is one, and sets `listening`."""
        if self.tls_listener is None:
            await super().startup(sockets=sockets)
        else:
            await super().startup(sockets=[])
            self.servers.append(self.tls_listener)  # implements the part of asyncio.Server that uvicorn uses
            self.tls_listener.start(self._new_protocol)
        for listening in sockets or ():
            listening.listen(QUEUE)
        self.listening.set()

    def _new_protocol(self) -> asyncio.Protocol:
        """Returns the protocol of a new TLS connection, as uvicorn creates it for others."""
        protocol: asyncio.Protocol = self.config.http_protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


class HttpServer:
    """The HTTP server on a port that is bound at once; run() serves until stop()."""

    def __init__(
        self,
        application: HttpApplication,
        host: str,
        port: int,
        *,
        share_port: bool,
        drain_timeout_s: float,
        tls: Tls,
        connections: ConnectionLimiter,
    ) -> None:
        """Binds the port and prepares uvicorn. `share_port`: other processes may bind it too; `drain_timeout_s`: time
        for running calls after stop()."""
        self._socket = ports.bind(host, port, "http_port", share=share_port)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Uvicorn(
            uvicorn.Config(
                application.app,
                http=protocol_class(application.admission_hooks, connections),
                loop="none",
                ws="none",  # the protocol hands connections over itself
                ws_max_size=MOST_MESSAGE_BYTES,
                ws_per_message_deflate=False,  # a small frame would become a large message
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=connections.limits.idle_s,
                timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
                backlog=ACCEPTED_AT_ONCE,
            )
        )
        if tls.serves:
            self._server.config.load()
            context = self._server.config.ssl = server_context(tls, "client_tls")
            self._server.tls_listener = TlsListener(self._socket, context, connections)

    async def run(self) -> None:
        """Serves until stop(), then closes the listeners."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            for server in self._server.servers:
                server.close()

    async def listening(self) -> None:
        await self._server.listening.wait()

    def stop(self) -> None:
        """Makes run() return once running calls are answered."""
        self._server.should_exit = True
