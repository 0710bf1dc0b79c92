"""KV tiers below a worker's device: host memory and disk."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # this module is also imported without torch
    from quire.services.worker.kv.host_memory import BlockMove, HostMemory, PendingCopy
    from quire.services.worker.offload.disk_moves import DiskMove, OnMoved
    from quire.services.worker.offload.disk_store import DiskStore


class NoHostMemory:
    """Replaces HostMemory where no blocks are kept in host memory."""

    num_places = 0

    def start_move(self, move: BlockMove) -> PendingCopy:
        """Raises AssertionError: with no place, orders are rejected before."""
        raise AssertionError("no move names a place")

    def contents(self) -> dict[int, bytes]:
        return {}

    def reset(self, identity: bytes) -> None:
        """No-op: nothing is stored."""


class NoDisk:
    """Replaces DiskStore where no blocks are kept on disk."""

    num_places = 0

    def start_move(self, move: DiskMove, answer: OnMoved) -> None:
        """Raises AssertionError: with no place, orders are rejected before."""
        raise AssertionError("no move names a place")

    def end_epoch(self) -> dict[int, bytes]:
        return {}

    def reset(self, identity: bytes) -> None:
        """No-op: nothing is stored."""


class Tiers(NamedTuple):
    """Host memory and disk for blocks that do not fit on the device."""

    host_memory: HostMemory | NoHostMemory = NoHostMemory()
    disk: DiskStore | NoDisk = NoDisk()
    identity: bytes = b""  # of blocks kept across restarts

    def reset(self, *, changed: bool) -> None:
        """Discards all blocks. `changed`: the weights are no longer those of the checkpoint, so no later process may
        use the blocks."""
        identity = secrets.token_bytes(32) if changed else self.identity
        self.host_memory.reset(identity)
        self.disk.reset(identity)
