"""A gRPC server as every Quire service runs it: options, health, reflection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc
import grpc.aio

from quire.shared import ports
from quire.shared.errors import FailedPrecondition
from quire.shared.rpc import health, reflection
from quire.shared.rpc.call_limits import HEADER_BYTES, CallLimitInterceptor
from quire.shared.rpc.channel import COMMON_OPTIONS, RECEIVE_OPTION, SERVICE_MESSAGE_BYTES
from quire.shared.rpc.connection_resets import ConnectionResets
from quire.shared.rpc.health import NOT_SERVING, SERVING
from quire.shared.security.tls import server_credentials
from quire.shared.security.tls_files import NO_TLS, Tls

SERVER_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),  # else our own keep-alive earns GOAWAY too_many_pings
    ("grpc.http2.max_ping_strikes", 0),
    # Headers of a call, once they are unpacked: a client can name one of 4 KB thousands of times, in a byte each.
    ("grpc.max_metadata_size", HEADER_BYTES // 2),  # more may be refused
    ("grpc.http2.settings_timeout", 5_000),  # for a client to acknowledge that; it is closed otherwise
    ("grpc.absolute_max_metadata_size", HEADER_BYTES),  # more is refused
]
STREAMS_OPTION = "grpc.max_concurrent_streams"
# Calls that a client has reset make room for its next ones at once, while this process still has to learn of them. So
# calls that have ended and are not cleared away yet count as well, beyond so many: of a client that keeps to the bound
# of calls under way there are fewer.
OVERLOAD_OPTIONS = [("grpc.http.overload_protection", 1), ("grpc.http2.max_deallocating_streams", 100)]
# Calls that wait for this process, of all connections; beyond the first number more and more of them are refused, no
# matter whose they are.
PENDING_OPTIONS = [("grpc.server.max_pending_requests", 4_000), ("grpc.server.max_pending_requests_hard_limit", 8_000)]
MAX_STREAMS = 100  # calls under way on one connection; a peer's session takes one, further calls wait with the caller
FIRST_MESSAGE_S = 10.0

LIVENESS = "liveness"  # health name that says SERVING while the process itself works, whatever its peers do


class Methods:
    """Where generated code adds the methods of a servicer. For each method that it registers by name, gRPC's server
    keeps a task, and looks at all of them with every call that comes: with 36 that is a tenth of what a short request
    costs a frontend. Found by their paths they cost nothing."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Generated code has just added the same as generic ones."""


class Server:
    """Add servicers to `.methods`, then `start()`; health says NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self,
        host: str,
        port: int,
        services: Iterable[str],
        *,
        share_port: bool = False,
        max_receive_bytes: int = SERVICE_MESSAGE_BYTES,
        tls: Tls = NO_TLS,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        port_setting: str = "grpc_port",
        tls_setting: str = "tls",
        more_options: Iterable[tuple[str, int]] = (),
        max_streams: int = MAX_STREAMS,
        first_message_s: float = FIRST_MESSAGE_S,
    ) -> None:
        """`max_receive_bytes`: a longer message ends its call with RESOURCE_EXHAUSTED before it is read.
        `max_streams`: calls under way on one connection. `first_message_s`: from a call's headers to its request.

        `port_setting` and `tls_setting` are what errors name."""
        ports.check(host, port, port_setting, share=share_port)  # gRPC itself would print a line of C++
        options = [
            *SERVER_OPTIONS,
            (RECEIVE_OPTION, max_receive_bytes),
            ("grpc.so_reuseport", int(share_port)),
            (STREAMS_OPTION, max_streams),
            *OVERLOAD_OPTIONS,
            *PENDING_OPTIONS,
            *more_options,
        ]
        outermost = CallLimitInterceptor(first_message_s, ConnectionResets())
        self._grpc = grpc.aio.server(options=options, interceptors=[outermost, *interceptors])
        self.methods = Methods(self._grpc)
        self._services = ("", *services)
        self._health = health.Health()
        self._grpc.add_generic_rpc_handlers((self._health.handler(),))
        names = (*services, health.SERVICE_NAME, *reflection.SERVICES)
        self._grpc.add_generic_rpc_handlers(tuple(reflection.handlers(names)))
        try:
            self.port = self._listen(f"{host}:{port}", tls, tls_setting)
        except RuntimeError as error:
            message = f"{port_setting}: cannot listen on {host}:{port}: {error}"
            raise FailedPrecondition(message, field=port_setting) from None

    def _listen(self, address: str, tls: Tls, tls_setting: str) -> int:
        if tls.serves:
            return self._grpc.add_secure_port(address, server_credentials(tls, tls_setting))
        return self._grpc.add_insecure_port(address)

    async def start(self) -> None:
        await self.set_serving(False)
        await self.set_alive(True)
        await self._grpc.start()

    async def set_serving(self, serving: bool) -> None:
        for service in self._services:
            self._health.set(service, SERVING if serving else NOT_SERVING)

    async def set_alive(self, alive: bool) -> None:
        self._health.set(LIVENESS, SERVING if alive else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self.set_serving(False)
        await self._grpc.stop(grace_s)
