"""Transfers between host memory and disk, as the scheduler orders them and while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.services.worker.kv.page_names import names_of
from quire.services.worker.step.plan_violation import require
from quire.shared import columns
from quire.shared.pb.worker.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class DiskMove:
    """A transfer of whole blocks between distinct places in host memory and on disk."""

    to_disk: bool
    places: list[int]  # in host memory
    disk_places: list[int]
    names: list[bytes]  # contents, as in shared/kv/block_hash.py

    @classmethod
    def of(cls, order: pb.DiskTransfer, num_places: int, num_disk_places: int, num_groups: int = 1) -> DiskMove:
        """Parses and validates an order: equal counts, places in range and distinct, known groups. Raises
        PlanViolation."""
        places, on_disk = columns.u32(order.place_ids), columns.u32(order.disk_place_ids)
        names = names_of(order, num_groups)
        counts = (len(places), len(on_disk), len(names))
        require(
            len(set(counts)) == 1 and len(places) > 0,
            lambda: f"a transfer of {counts} places, places on disk and hashes",
        )
        for what, ids, end in (("place", places, num_places), ("place on disk", on_disk, num_disk_places)):
            inside = bool(ids.max() < end)
            require(inside, lambda: f"disk transfer: {what} ids are not all in 0..{end - 1}: {ids}")  # noqa: B023
            once = len(np.unique(ids)) == len(ids)
            require(once, lambda: f"disk transfer: {what} ids come more than once: {ids}")  # noqa: B023
        return cls(order.to_disk, places.tolist(), on_disk.tolist(), names)


OnMoved = Callable[[list[int], int], None]  # indices of the blocks that failed; duration in microseconds


@dataclass(slots=True, eq=False)
class PendingDiskMove:
    """A transfer until it is answered; each of its blocks is a separate task."""

    move: DiskMove
    answer: OnMoved
    epoch: int  # epoch of the store at the order
    begun_ns: int
    remaining: set[int] = field(default_factory=set)  # indices of unfinished blocks
    lost: list[int] = field(default_factory=list)
    answered: bool = False

    def __post_init__(self) -> None:
        self.remaining = set(range(len(self.move.names)))
