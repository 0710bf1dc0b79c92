"""Sockets to listen on, and one wording for a port that cannot be had."""

from __future__ import annotations

import errno
import socket
from typing import Any

from quire.shared.errors import FailedPrecondition, InvalidArgument, QuireError


def bind(host: str, port: int, field: str, *, share: bool = False) -> socket.socket:
    """A socket that is bound and does not listen yet. `share`: others may bind the port, too (SO_REUSEPORT).

    Raises FailedPrecondition naming `field`, the setting that the port is from, and InvalidArgument for the host.
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
    """Raises what bind() would: for those who bind it later, or with a library that has no words for it."""
    bind(host, port, field, share=share).close()


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The first address that `host` stands for."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise InvalidArgument(f"host: {host!r} is no address of this machine: {error.strerror}", field="host") from None
    family, *_, address = found[0]
    return family, address


def refusal(host: str, port: int, field: str, error: OSError) -> QuireError:
    if error.errno != errno.EADDRINUSE:
        return FailedPrecondition(f"{field}: cannot listen on {host}:{port}: {error.strerror}", field=field)
    flag = f"--{field.replace('_', '-')}"
    return FailedPrecondition(
        f"{field}: {host}:{port} is in use; choose another with {flag} PORT, or any free one with {flag} 0", field=field
    )
