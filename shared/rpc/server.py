"""gRPC server with the options, health and reflection that every Quire service uses."""

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
    (
        "grpc.http2.min_ping_interval_without_data_ms",
        1_000,
    ),  # otherwise the peers' keep-alive causes GOAWAY too_many_pings
    ("grpc.http2.max_ping_strikes", 0),
    # Decompressed headers of a call: HPACK can repeat a header of 4 KB thousands of times, in one byte each.
    ("grpc.max_metadata_size", HEADER_BYTES // 2),  # more may be refused
    ("grpc.http2.settings_timeout", 5_000),  # for a client to acknowledge the limit; otherwise it is disconnected
    ("grpc.absolute_max_metadata_size", HEADER_BYTES),  # more is refused
]
STREAMS_OPTION = "grpc.max_concurrent_streams"
# A reset call frees its slot at once, before this process has handled the reset. Therefore
# ended calls that are not cleaned up yet count as well, beyond this number; a client that respects the limit
# of concurrent calls has fewer.
OVERLOAD_OPTIONS = [("grpc.http.overload_protection", 1), ("grpc.http2.max_deallocating_streams", 100)]
# Calls waiting for this process, over all connections; beyond the first number a growing share of them is refused,
# regardless of the client.
PENDING_OPTIONS = [("grpc.server.max_pending_requests", 4_000), ("grpc.server.max_pending_requests_hard_limit", 8_000)]
MAX_STREAMS = 100  # concurrent calls per connection; a peer's session takes one, further calls wait in the client
FIRST_MESSAGE_S = 10.0

LIVENESS = "liveness"  # health service name that reports the process itself, independent of its peers


class Methods:
    """Target for generated code that adds a servicer's methods. Registers them as generic handlers only: for each
    method registered by name, gRPC's server keeps a task and inspects all of them on every call, which for 36
    methods is a tenth of the cost of a short request."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Ignored: generated code has already added the same methods as generic handlers."""


class Server:
    """A gRPC server: add servicers to `.methods`, then `start()`. Health is NOT_SERVING until `set_serving(True)`."""

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
        """`max_receive_bytes`: a longer message ends its call with RESOURCE_EXHAUSTED before it is read. `max_streams`:
        concurrent calls per connection. `first_message_s`: time from a call's headers to its request.

        `port_setting` and `tls_setting` are the setting names used in errors.
        """
        ports.check(host, port, port_setting, share=share_port)  # gRPC itself would only print a C++ error
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
