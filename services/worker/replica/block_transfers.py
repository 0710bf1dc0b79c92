"""Blocks that are filled and read beside the steps: host memory and disk below the device, pages of other workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.kv.held_blocks import HeldBlocks
from quire.services.worker.kv.host_memory import BlockMove, Moving
from quire.services.worker.kv_transfer.pages import WRITTEN, NoPages, Pages, ReadPages
from quire.services.worker.kv_transfer.peer_pages import PeerBlocks
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.offload.disk_moves import Answer, DiskMove
from quire.services.worker.offload.tiers import Tiers
from quire.services.worker.replica.component import ReplicaComponent
from quire.services.worker.replica.held_report import HeldReport
from quire.services.worker.replica.orders import NoOrders, Orders
from quire.shared.columns import U32
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:  # this module is also read where there is no torch
    from torch import Tensor


class BlockTransfers(ReplicaComponent):
    """Moves blocks between the device, what lies below it and other workers; the record of blocks follows."""

    def __init__(
        self, limits: WorkerLimits, held: HeldBlocks, tiers: Tiers, pages: Pages | NoPages, orders: Orders | NoOrders
    ) -> None:
        """`tiers`: for blocks that the device has no room for; `pages`: where other workers read and write them;
        `orders`: knows with which weights blocks are filled."""
        self._limits, self._held, self.tiers, self.pages, self._orders = limits, held, tiers, pages, orders
        self._first_weights = orders.weights_name
        pages.versioned_by(lambda: orders.pages_version)

    @property
    def num_host_blocks(self) -> int:
        """Capacity of host memory, in blocks."""
        return self.tiers.host_memory.num_places

    @property
    def num_disk_blocks(self) -> int:
        """Capacity of the disk, in blocks."""
        return self.tiers.disk.num_places

    def move(self, order: pb.Transfer) -> Moving:
        """Begins to move blocks, behind the steps that have been launched. Raises PlanViolation, or what the device
        raises: then nothing is known of what was to be written."""
        move = BlockMove.of(order, self._limits.num_blocks, self.num_host_blocks, self._limits.num_groups)
        if move.to_host:
            return self.tiers.host_memory.begin(move)
        self._held.lose(move.blocks)
        moving = self.tiers.host_memory.begin(move)
        self._held.fill(move.blocks, move.names)
        return moving

    def move_on_disk(self, order: pb.DiskTransfer, answer: Answer) -> None:
        """Begins to move blocks, from any thread: see DiskStore. Raises PlanViolation."""
        move = DiskMove.of(order, self.num_host_blocks, self.num_disk_blocks, self._limits.num_groups)
        self.tiers.disk.begin(move, answer)

    def read_pages(self, blocks: U32, *, copied: bool = True) -> ReadPages:
        """Begins to read blocks, or to wait for what they hold, behind the steps that have been launched. Raises
        FailedPrecondition for what has been forgotten, or what the device raises."""
        if not self._held.knows(blocks):
            raise FailedPrecondition("block_ids: some hold nothing that is known here", field="block_ids")
        return self.pages.read(blocks) if copied else self.pages.filled()

    def write_pages(self, blocks: U32, pages: Tensor | PeerBlocks) -> Moving:
        """Begins to write what came from another worker into blocks that no sequence owns."""
        self._held.lose(blocks)
        return self.pages.write(blocks, pages)

    def believe_pages(self, blocks: U32, hashes: list[bytes]) -> Moving:
        """Records what has been written into these blocks, now that it is known to be what it should be: a GPU's memory
        may have changed under the copy, and no report may name it before."""
        self._held.fill(blocks, hashes)
        return WRITTEN

    def end_epoch(self, report: HeldReport) -> HeldReport:
        self.pages.settle()
        on_disk = self.tiers.disk.settle()  # before host memory: what is on its way there does not come any more
        return replace(report, on_disk=on_disk, in_host_memory=self.tiers.host_memory.held())

    def forget_cache(self) -> None:
        # Weights that were changed are in no folder: no later life of the worker finds their blocks again.
        self.tiers.forget(changed=self._orders.weights_name != self._first_weights)
