"""Address and key of a service's admin port, published for local commands in a folder that only this user can open.

There is one file per service process, named after its gRPC port, so that `quire status --grpc-port N` needs no other
settings on the machine where the service runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.shared.errors import FailedPrecondition
from quire.shared.process.runtime_folder import runtime_folder
from quire.shared.security import secret_file
from quire.shared.settings.base import LOOPBACK


@dataclass(frozen=True, slots=True)
class AdminCredentials:
    """Address and key of an admin service."""

    address: str
    key: str


def publish(role: str, grpc_port: int, admin: AdminCredentials) -> Path:
    """Writes the credentials file of this process and removes those of processes that have exited; returns its path.
    Raises FailedPrecondition or OSError."""
    place = runtime_folder()
    for path in place.glob("*.json"):
        if not _is_alive(path):
            path.unlink(missing_ok=True)
    path = place / f"{role}-{grpc_port}-{os.getpid()}.json"
    secret_file.write(path, json.dumps(asdict(admin)))
    return path


def find(address: str, role: str = "*") -> AdminCredentials | None:
    """Returns the credentials of this user's local service whose gRPC address is `address`; None if there is none.
    `role`: restricts the kind of service."""
    host, _, port = address.rpartition(":")
    if host not in LOOPBACK:
        return None
    with contextlib.suppress(FailedPrecondition, OSError, ValueError):
        for path in sorted(runtime_folder().glob(f"{role}-{port}-*.json")):
            if _is_alive(path):
                return AdminCredentials(**json.loads(path.read_text()))
    return None


def _is_alive(path: Path) -> bool:
    """Returns whether the process in a file's name runs and belongs to this user."""
    with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
        os.kill(int(path.stem.rsplit("-", 1)[1]), 0)
        return True
    return False
