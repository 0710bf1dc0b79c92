"""Orders to a worker: blocks to move between its tiers."""

from __future__ import annotations

from dataclasses import dataclass

# Of a sequence for blocks of one tier: whoever loses them again before it comes in computes them.
MOST_WAITS = 2


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Between device and host memory, behind the steps that were ordered before."""

    transfer_id: int
    to_host: bool  # else to the device
    blocks: list[int]
    places: list[int]  # in host memory, same order
    hashes: list[bytes]  # names of what they hold (shared/kv/block_hash.py)


@dataclass(frozen=True, slots=True)
class DiskOrder:
    """Between host memory and disk, beside everything else."""

    transfer_id: int
    to_disk: bool  # else to host memory
    places: list[int]  # in host memory
    disk_places: list[int]  # same order
    hashes: list[bytes]  # names of what they hold (shared/kv/block_hash.py)
