"""Orders to a worker to move blocks between its tiers."""

from __future__ import annotations

from dataclasses import dataclass

# Maximum waits of a sequence for blocks of one tier; if they are evicted again before its admission, it computes them.
MOST_WAITS = 2


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Transfer between device and host memory, executed after the steps planned before it."""

    transfer_id: int
    to_host: bool  # otherwise to the device
    blocks: list[int]
    places: list[int]  # places in host memory, in the order of `blocks`
    hashes: list[bytes]  # names of the contents (shared/kv/block_hash.py)


@dataclass(frozen=True, slots=True)
class DiskOrder:
    """Transfer between host memory and disk, concurrent to everything else."""

    transfer_id: int
    to_disk: bool  # otherwise to host memory
    places: list[int]  # places in host memory
    disk_places: list[int]  # places on disk, in the order of `places`
    hashes: list[bytes]  # names of the contents (shared/kv/block_hash.py)
