"""Finds sockets of this process by their remote address, because gRPC does not expose its own."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

DESCRIPTORS = Path("/proc/self/fd")
MAPPED = "::ffff:"  # prefix of IPv4 addresses on a dual-stack socket
FAMILIES = (socket.AF_INET, socket.AF_INET6)


def descriptors() -> list[str]:
    """Returns all descriptors of this process; empty where the system does not list them."""
    return os.listdir(DESCRIPTORS) if DESCRIPTORS.exists() else []


def connections(found: Iterable[str]) -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    """Yields a duplicate of each descriptor that is a TCP connection, with its remote address and port. The
    duplicate must be closed by the caller, and stays valid when gRPC closes its own."""
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
    """Returns the remote address and port of a connected TCP socket, IPv4-mapped addresses as IPv4; None for any
    other socket."""
    if held.family not in FAMILIES or held.type != socket.SOCK_STREAM:
        return None
    try:
        address, port, *_ = held.getpeername()
    except OSError:  # listening, or closed
        return None
    return str(address).removeprefix(MAPPED), int(port)


def close(peer: str) -> bool:
    """Shuts down the connection to `peer`, in gRPC's notation such as ipv4:127.0.0.1:1234 and ipv6:%5B::1%5D:1234.
    Returns whether there was one."""
    wanted = address_of(peer)
    if wanted is None:
        return False
    was_found = False
    for held, found in connections(descriptors()):
        with held, contextlib.suppress(OSError):
            if found == wanted:
                held.shutdown(socket.SHUT_RDWR)
                was_found = True
    return was_found


def address_of(peer: str) -> tuple[str, int] | None:
    """Returns address and port; None for a peer that is not a TCP connection."""
    family, _, rest = unquote(peer).partition(":")
    address, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return address.strip("[]").removeprefix(MAPPED), int(port)
