"""Ports for services that need a fixed one and cannot report a free one."""

from __future__ import annotations

import random
import socket

# Below the ephemeral range: only an explicit bind takes one of these.
QUIET = range(20_000, 32_000)


def quiet_port(address: str = "127.0.0.1") -> int:
    """Returns a free port that is unlikely to be taken before it is bound."""
    while True:
        port = random.choice(QUIET)
        try:
            socket.create_server((address, port)).close()
        except OSError:
            continue
        return port
