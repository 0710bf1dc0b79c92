"""What lies below a worker's device."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # this module is also read where there is no torch
    from quire.services.worker.kv.host_memory import BlockMove, HostMemory, PendingCopy
    from quire.services.worker.offload.disk_moves import DiskMove, OnMoved
    from quire.services.worker.offload.disk_store import DiskStore


class NoHostMemory:
    """No blocks are kept in host memory."""

    num_places = 0

    def start_move(self, move: BlockMove) -> PendingCopy:
        raise AssertionError("no move names a place")

    def contents(self) -> dict[int, bytes]:
        return {}

    def reset(self, identity: bytes) -> None:
        """Nothing is held."""


class NoDisk:
    """No blocks are kept on disk."""

    num_places = 0

    def start_move(self, move: DiskMove, answer: OnMoved) -> None:
        raise AssertionError("no move names a place")

    def end_epoch(self) -> dict[int, bytes]:
        return {}

    def reset(self, identity: bytes) -> None:
        """Nothing is held."""


class Tiers(NamedTuple):
    """Where blocks are kept that the device has no room for."""

    host_memory: HostMemory | NoHostMemory = NoHostMemory()
    disk: DiskStore | NoDisk = NoDisk()
    identity: bytes = b""  # of what they keep over restarts

    def reset(self, *, changed: bool) -> None:
        """All that they hold. `changed`: what comes is of weights that no later life can have."""
        identity = secrets.token_bytes(32) if changed else self.identity
        self.host_memory.reset(identity)
        self.disk.reset(identity)
