"""Access to this worker's pages from its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from quire.services.worker.kv_transfer.fetcher import FetchReceiver
from quire.services.worker.kv_transfer.page_orders import CommitBlocks, PageOrder, ReadBlocks, WriteBlocks
from quire.services.worker.kv_transfer.pages import Pages
from quire.services.worker.kv_transfer.peer_pages import PeerBlocks, PeerPages
from quire.shared.columns import U32
from quire.shared.errors import FailedPrecondition


class DeviceClient(Protocol):
    """The engine, as seen by PagePort."""

    @property
    def receiver(self) -> Any:
        """The current attachment; None before the first."""

    async def run_page_order(self, make: Callable[[asyncio.Future[Any]], PageOrder]) -> Any:
        """Submits an order and returns its reply; raises the order's error."""


class PagePort:
    """PageReader and PageWriter of one worker: turns calls into orders to the device thread and awaits them."""

    def __init__(self, engine: DeviceClient, pages: Pages) -> None:
        self._engine, self._pages = engine, pages

    @property
    def page_layout(self) -> bytes:
        return self._pages.layout

    @property
    def page_bytes(self) -> int:
        return self._pages.block_bytes

    @property
    def blocks_per_piece(self) -> int:
        return self._pages.blocks_per_piece

    def may_write(self, receiver: FetchReceiver) -> bool:
        """Returns whether the attachment that ordered a fetch is still current."""
        return receiver is self._engine.receiver

    @property
    def peers(self) -> PeerPages | None:
        return self._pages.peers

    async def read_pages(self, epoch: int, after_step: int, blocks: U32) -> Tensor:
        """Reads pages on the device thread once step `after_step` is launched: uint8 [num_blocks, page_bytes] in host
        memory. Raises FailedPrecondition outside `epoch` and for blocks of unknown content."""
        receiver = self._receiver_in(epoch)
        pages: Tensor = await self._engine.run_page_order(lambda reply: ReadBlocks(receiver, after_step, blocks, reply))
        return pages

    async def wait_for_pages(self, epoch: int, after_step: int, blocks: U32) -> None:
        """Waits until step `after_step` has filled the blocks, copying nothing. Raises FailedPrecondition as
        read_pages()."""
        receiver = self._receiver_in(epoch)
        await self._engine.run_page_order(lambda reply: ReadBlocks(receiver, after_step, blocks, reply, copied=False))

    def check_epoch(self, epoch: int) -> None:
        """Raises FailedPrecondition if the current attachment's epoch is another one."""
        self._receiver_in(epoch)

    def _receiver_in(self, epoch: int) -> Any:
        """Returns the current attachment. Raises FailedPrecondition if its epoch is not `epoch`, or 0."""
        receiver = self._engine.receiver
        if receiver is None or receiver.epoch != epoch or not epoch:
            ours = 0 if receiver is None else receiver.epoch
            raise FailedPrecondition(f"epoch: this worker is in epoch {ours}, not {epoch}", field="epoch")
        return receiver

    async def write_pages(self, receiver: FetchReceiver, blocks: U32, pages: Tensor | PeerBlocks) -> None:
        """Writes pages into `blocks` on the device thread and returns when the copy has finished. Raises
        FailedPrecondition if the attachment has ended."""
        await self._engine.run_page_order(lambda reply: WriteBlocks(receiver, blocks, pages, reply))

    async def commit_pages(self, receiver: FetchReceiver, blocks: U32, hashes: list[bytes]) -> None:
        """Records on the device thread that `blocks` hold the contents with `hashes`. Raises FailedPrecondition if the
        attachment has ended."""
        await self._engine.run_page_order(lambda reply: CommitBlocks(receiver, blocks, hashes, reply))
