"""Limits for the connections of a frontend."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of HTTP connections unless stated otherwise. The defaults suit a proxy in front, which has one address
    for all clients, as well as direct clients."""

    header_s: int = 10  # from the connection, or a request's first byte, until its headers are complete; also for gRPC
    header_bytes: int = 65_536  # of a request, its target included
    body_s: int = 60  # until the body is complete
    write_s: int = 60  # without progress while the client does not read
    # Between requests; longer than clients and load balancers keep a connection, because a request that arrives as the
    # server closes it is lost.
    idle_s: int = 75
    per_address: int = 4096  # connections per client address, at most half of all; the same number again for gRPC
    grpc: int = 16_384  # gRPC connections in all, at most a third of the process's descriptors
    grpc_idle_s: int = 300  # of a gRPC connection without calls; clients reconnect automatically
    # Concurrent calls per gRPC connection; more wait in the client. A client that does not acknowledge the settings
    # makes gRPC buffer the headers of this many calls, up to 1 MB each, until it is disconnected after five seconds.
    grpc_streams: int = 256
    reserved: int = 256  # descriptors of the process kept for everything else

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))
