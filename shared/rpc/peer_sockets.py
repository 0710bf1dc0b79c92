"""Sockets of this process by what is at their other end: gRPC shows none of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

DESCRIPTORS = Path("/proc/self/fd")
MAPPED = "::ffff:"  # an IPv4 address at a socket that takes both
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def descriptors() -> list[str]:
    """Returns all descriptors of this process; none where the system does not show them."""
    return os.listdir(DESCRIPTORS) if DESCRIPTORS.exists() else []


def connections(found: Iterable[str]) -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    """Yields each descriptor that is a connection over TCP, and the address and port of its other end. Each is a
    descriptor of its own, to be closed by the caller, so that it stays the same whatever gRPC closes meanwhile."""
    for text in found:
        with contextlib.suppress(OSError):
            own = os.dup(int(text))
            if not stat.S_ISSOCK(os.fstat(own).st_mode):
                os.close(own)
                continue
            held = socket.socket(fileno=own)
            if (peer := _peer(held)) is None:
                held.close()
            else:
                yield held, peer


def _peer(held: socket.socket) -> tuple[str, int] | None:
    if held.family not in FAMILIES or held.type != socket.SOCK_STREAM:
        return None
    try:
        address, port, *_ = held.getpeername()
    except OSError:  # it listens, or has ended
        return None
    return str(address).removeprefix(MAPPED), int(port)


def close(peer: str) -> bool:
    """Shuts down the connection whose other end gRPC calls `peer`, as in ipv4:127.0.0.1:1234 and ipv6:%5B::1%5D:1234.
    Returns whether there was one."""
    wanted = address_of(peer)
    if wanted is None:
        return False
    was_there = False
    for held, found in connections(descriptors()):
        with held, contextlib.suppress(OSError):
            if found == wanted:
                held.shutdown(socket.SHUT_RDWR)
                was_there = True
    return was_there


def address_of(peer: str) -> tuple[str, int] | None:
    """Returns address and port; None for a peer that is no TCP connection."""
    family, _, rest = unquote(peer).partition(":")
    address, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return address.strip("[]").removeprefix(MAPPED), int(port)
