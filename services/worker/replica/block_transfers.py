"""Block transfers concurrent with steps: host memory, disk and the pages of other workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.kv.block_contents import BlockContents
from quire.services.worker.kv.host_memory import BlockMove, PendingCopy
from quire.services.worker.kv_transfer.pages import COMPLETED, NoPages, Pages, ReadPages
from quire.services.worker.kv_transfer.peer_pages import PeerBlocks
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.offload.disk_moves import DiskMove, OnMoved
from quire.services.worker.offload.tiers import Tiers
from quire.services.worker.replica.component import ReplicaComponent
from quire.services.worker.replica.device_orders import DeviceOrderHandler, NoDeviceOrders
from quire.services.worker.replica.retained_state import RetainedState
from quire.shared.columns import U32
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:  # this module is also imported without torch
    from torch import Tensor


class BlockTransfers(ReplicaComponent):
    """Transfers blocks between the device, lower tiers and other workers, and keeps the record of blocks up to date."""

    def __init__(
        self,
        limits: WorkerLimits,
        held: BlockContents,
        tiers: Tiers,
        pages: Pages | NoPages,
        orders: DeviceOrderHandler | NoDeviceOrders,
    ) -> None:
        """`tiers`: storage below the device; `pages`: byte access for other workers; `orders`: provides the identity of
        the current weights."""
        self._limits, self._contents, self.tiers, self.pages, self._orders = limits, held, tiers, pages, orders
        self._first_weights = orders.weights_name
        pages.set_weight_version(lambda: orders.pages_version)

    @property
    def num_host_blocks(self) -> int:
        """Capacity of host memory, in blocks."""
        return self.tiers.host_memory.num_places

    @property
    def num_disk_blocks(self) -> int:
        """Capacity of the disk, in blocks."""
        return self.tiers.disk.num_places

    def move(self, order: pb.Transfer) -> PendingCopy:
        """Starts a transfer to or from host memory after the launched steps, and records the blocks that it fills.
        Raises PlanViolation, or what the device raises; the target blocks' contents are then unknown."""
        move = BlockMove.of(order, self._limits.num_blocks, self.num_host_blocks, self._limits.num_groups)
        if move.to_host:
            return self.tiers.host_memory.start_move(move)
        self._contents.invalidate(move.blocks)
        pending = self.tiers.host_memory.start_move(move)
        self._contents.commit(move.blocks, move.names)
        return pending

    def move_on_disk(self, order: pb.DiskTransfer, answer: OnMoved) -> None:
        """Starts a transfer between host memory and disk; see DiskStore. Callable from any thread. Raises
        PlanViolation."""
        move = DiskMove.of(order, self.num_host_blocks, self.num_disk_blocks, self._limits.num_groups)
        self.tiers.disk.start_move(move, answer)

    def read_pages(self, blocks: U32, *, copied: bool = True) -> ReadPages:
        """Starts reading blocks after the launched steps, or waiting until they are filled. Raises FailedPrecondition
        for blocks of unknown content, or what the device raises."""
        if not self._contents.are_known(blocks):
            raise FailedPrecondition("block_ids: the content of some blocks is unknown", field="block_ids")
        return self.pages.read(blocks) if copied else self.pages.wait_filled()

    def write_pages(self, blocks: U32, pages: Tensor | PeerBlocks) -> PendingCopy:
        """Starts writing pages of another worker into blocks that no sequence owns; their contents are unknown until
        commit_pages()."""
        self._contents.invalidate(blocks)
        return self.pages.write(blocks, pages)

    def commit_pages(self, blocks: U32, hashes: list[bytes]) -> PendingCopy:
        """Records the contents of blocks after their verification: a source GPU's memory may have changed during the
        copy, so the contents are not reported before."""
        self._contents.commit(blocks, hashes)
        return COMPLETED

    def end_epoch(self, report: RetainedState) -> RetainedState:
        """Waits for page copies, discards pending disk transfers, and adds the contents of host memory and disk to the
        report."""
        self.pages.synchronize()
        on_disk = self.tiers.disk.end_epoch()  # before host memory: pending reads into it are discarded
        return replace(report, on_disk=on_disk, in_host_memory=self.tiers.host_memory.contents())

    def reset_cache(self) -> None:
        """Discards the blocks in host memory and on disk."""
        # Updated weights are in no checkpoint folder, so no later process of the worker may reuse their blocks.
        self.tiers.reset(changed=self._orders.weights_name != self._first_weights)
