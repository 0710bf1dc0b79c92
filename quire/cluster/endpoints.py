"""Addresses of a cluster's processes, reserved from start to end even while no process listens."""

from __future__ import annotations

import errno
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.shared import ports
from quire.shared.errors import FailedPrecondition
from quire.shared.security import secret_file

LOOPBACK = "127.0.0.1"


class Endpoints:
    """Reserves ports with sockets that are bound but never listen, and a private folder for Unix sockets and secrets.

    Other processes can neither be assigned such a port nor take it; Quire's services, which bind with SO_REUSEPORT,
    can, and receive all connections because the reserving socket does not listen. A restarted service therefore
    finds its port free.
    """

    def __init__(self, make_folder: Callable[..., str] = tempfile.mkdtemp) -> None:
        self._make_folder = make_folder
        self._sockets: list[socket.socket] = []
        self._folder: Path | None = None

    def hold_port(self, field: str, host: str = LOOPBACK, port: int = 0) -> int:
        """Reserves a port and returns it; 0: any free one. Raises FailedPrecondition, naming `field`, if another
        process uses it."""
        family, address = ports.resolve(host, port)
        held = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.append(held)
        try:
            _bind_alone(held, address)
        except OSError as error:
            raise ports.refusal(host, port, field, error) from None
        held.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEPORT, 1
        )  # set after binding, so that no other cluster can share the port
        return int(held.getsockname()[1])

    def path(self, name: str) -> Path:
        """Returns a path in a folder that only this user can access. Raises FailedPrecondition if there is none."""
        if self._folder is None:
            try:
                self._folder = Path(self._make_folder(prefix="quire-"))
            except OSError as error:
                message = (
                    f"cannot create a folder for sockets and the cluster's secret: {error}; set TMPDIR to a "
                    "folder that can be written"
                )
                raise FailedPrecondition(message) from None
        return self._folder / name

    def secret(self, name: str) -> Path:
        """Returns a file with a random secret, created on the first call; raises FailedPrecondition if it cannot be
        written."""
        path = self.path(name)
        if not path.exists():
            try:
                secret_file.write(path, secrets.token_hex(32))
            except OSError as error:
                raise FailedPrecondition(
                    f"cannot write {path}: {error.strerror}; set TMPDIR to a folder that can be written"
                ) from None
        return path

    def close(self) -> None:
        """Releases the reserved ports and removes the folder of sockets; may be called again."""
        for held in self._sockets:
            held.close()
        self._sockets.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _bind_alone(held: socket.socket, address: Any) -> None:
    """Binds a socket; an address in use is tried again with SO_REUSEADDR, which only ignores closed connections.
    Raises OSError if a process listens on it."""
    try:
        held.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # there may be closed connections only
        held.bind(address)
