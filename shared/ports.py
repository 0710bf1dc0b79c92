"""Binding of listening sockets, with uniform error messages for unavailable ports."""

from __future__ import annotations

import errno
import socket
from typing import Any

from quire.shared.errors import FailedPrecondition, InvalidArgument, QuireError


def bind(host: str, port: int, field: str, *, share: bool = False) -> socket.socket:
    """Returns a bound socket that does not listen yet. `share`: allow other processes to bind the port (SO_REUSEPORT).

    Raises FailedPrecondition naming `field`, the setting of the port, and InvalidArgument for an invalid host.
    """
    family, address = resolve(host, port)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise refusal(host, port, field, error) from None
    return bound


def check(host: str, port: int, field: str, *, share: bool = False) -> None:
    """Raises what bind() would raise, for a port that is bound later or by a library without useful errors."""
    bind(host, port, field, share=share).close()


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Returns the family and the first address that `host` resolves to, for bind(). Raises InvalidArgument if it
    resolves to none."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise InvalidArgument(
            f"host: {host!r} is not an address of this machine: {error.strerror}", field="host"
        ) from None
    family, *_, address = found[0]
    return family, address


def refusal(host: str, port: int, field: str, error: OSError) -> QuireError:
    """Returns the error for a port that cannot be bound; if it is in use, with the flag that selects another."""
    if error.errno != errno.EADDRINUSE:
        return FailedPrecondition(f"{field}: cannot listen on {host}:{port}: {error.strerror}", field=field)
    flag = f"--{field.replace('_', '-')}"
    return FailedPrecondition(
        f"{field}: {host}:{port} is in use; choose another with {flag} PORT, or any free one with {flag} 0", field=field
    )
