"""How many connections a frontend keeps, and for how long it waits for whoever is slow."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of HTTP where not said otherwise. Defaults serve a proxy in front, which has one address for everybody, as well
    as clients of their own."""

    header_s: int = 10  # from a connection, or the first byte of a call, until its headers are complete; of gRPC, too
    header_bytes: int = 65_536  # of a call, its target included
    body_s: int = 60  # until its body is complete
    write_s: int = 60  # for a client that does not read to take something again
    # Between calls; longer than clients and load balancers keep a connection themselves: a call that comes as the
    # server closes is lost.
    idle_s: int = 75
    per_address: int = 4096  # connections of one address, at most half of all; of gRPC as many again
    grpc: int = 16_384  # gRPC connections of all addresses, at most a third of the process's descriptors
    grpc_idle_s: int = 300  # of a gRPC connection without a call; clients open it again by themselves
    # Calls under way on one gRPC connection; more wait in the client. A client that does not acknowledge its settings
    # makes gRPC hold the headers of as many calls, up to 1 MB each, until it is closed after five seconds.
    grpc_streams: int = 256
    reserved: int = 256  # of the process's descriptors, for everything else

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))
