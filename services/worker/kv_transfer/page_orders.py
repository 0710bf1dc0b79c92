"""Page orders on the device thread: reads after the step that fills the pages, writes and commits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from quire.services.worker.kv.host_memory import PendingCopy
from quire.services.worker.kv_transfer.pages import ReadPages
from quire.services.worker.kv_transfer.peer_pages import PeerBlocks
from quire.shared.columns import U32
from quire.shared.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Reads blocks once step `after_step` of the receiver's attachment has been launched."""

    receiver: Any
    after_step: int
    blocks: U32
    reply: asyncio.Future[Any]
    copied: bool = True  # copy to host memory; False: only wait until they are filled


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Writes blocks that no submitted step uses; their content is unknown until CommitBlocks."""

    receiver: Any
    blocks: U32
    pages: Tensor | PeerBlocks
    reply: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class CommitBlocks:
    """Commits blocks that have been written completely and verified."""

    receiver: Any
    blocks: U32
    hashes: list[bytes]
    reply: asyncio.Future[Any]


PageOrder = ReadBlocks | WriteBlocks | CommitBlocks


@dataclass(frozen=True, slots=True)
class PendingPageIO:
    """Page reads or writes in progress; `content` is the reply once `pending` has finished."""

    order: PageOrder
    pending: PendingCopy
    content: Tensor | None


class PagedReplica(Protocol):
    """Page access of a replica, as BlockTransfers implements it; methods start work and raise what prevents it."""

    def read_pages(self, blocks: U32, *, copied: bool = True) -> ReadPages: ...

    def write_pages(self, blocks: U32, pages: Tensor | PeerBlocks) -> PendingCopy: ...

    def commit_pages(self, blocks: U32, hashes: list[bytes]) -> PendingCopy: ...


class PageOutcomeHandler(Protocol):
    """Handles the outcomes of page orders on the device thread; page_io_failed() re-raises fatal device errors."""

    def is_current(self, receiver: Any) -> bool: ...

    def page_io_started(self, pending_io: PendingPageIO) -> None: ...

    def page_io_failed(self, order: PageOrder, error: Exception) -> None: ...


class PageOrderQueue:
    """Executes page orders on the device thread and holds reads back until their step is launched."""

    def __init__(self, replica: PagedReplica, outcomes: PageOutcomeHandler) -> None:
        self._replica, self._outcomes = replica, outcomes
        self._last_step = 0  # last launched step of this attachment
        self._parked: list[ReadBlocks] = []  # wait for a step that is not launched yet

    def process(self, order: PageOrder) -> None:
        """Starts an order, or parks a read until step `after_step` is launched. An order of an ended attachment fails;
        a cancelled read is dropped."""
        if not self._outcomes.is_current(order.receiver):
            self._outcomes.page_io_failed(order, _attachment_ended())
        elif isinstance(order, ReadBlocks) and order.after_step > self._last_step:
            if not order.reply.cancelled():
                self._parked.append(order)
        else:
            self._begin(order)

    def step_launched(self, step_id: int) -> None:
        """Records the last launched step and starts the parked reads that waited for it."""
        self._last_step = step_id
        if self._parked:
            parked, self._parked = self._parked, []
            for order in parked:
                self.process(order)

    def end_epoch(self) -> None:
        """Fails the parked reads, as their attachment has ended, and restarts step ids at 0."""
        self._last_step = 0
        parked, self._parked = self._parked, []
        for order in parked:
            self._outcomes.page_io_failed(order, _attachment_ended())

    def _begin(self, order: PageOrder) -> None:
        """Starts an order on the replica and reports it as started, or its error as failed."""
        try:
            if isinstance(order, ReadBlocks):
                read = self._replica.read_pages(order.blocks, copied=order.copied)
                pending_io = PendingPageIO(order, read.pending, read.content)
            elif isinstance(order, WriteBlocks):
                pending_io = PendingPageIO(order, self._replica.write_pages(order.blocks, order.pages), None)
            else:
                pending_io = PendingPageIO(order, self._replica.commit_pages(order.blocks, order.hashes), None)
        except Exception as error:
            self._outcomes.page_io_failed(order, error)
            return
        self._outcomes.page_io_started(pending_io)


def _attachment_ended() -> FailedPrecondition:
    return FailedPrecondition("epoch: the attachment of these blocks has ended")
