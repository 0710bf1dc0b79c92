"""What the device's thread does with pages: reads them behind the step that fills them, writes what came."""

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
    """Once the step `after_step` of the receiver's attachment has been launched."""

    receiver: Any
    after_step: int
    blocks: U32
    reply: asyncio.Future[Any]
    copied: bool = True  # to host memory; otherwise only waited for


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """At once: no step that was ordered reads or writes these blocks. Nobody counts on what they then hold."""

    receiver: Any
    blocks: U32
    pages: Tensor | PeerBlocks
    reply: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class CommitBlocks:
    """All that was written into them is what was wanted."""

    receiver: Any
    blocks: U32
    hashes: list[bytes]
    reply: asyncio.Future[Any]


PageOrder = ReadBlocks | WriteBlocks | CommitBlocks


@dataclass(frozen=True, slots=True)
class PendingPageIO:
    """On their way; `content` is what is replied once `pending` is done."""

    order: PageOrder
    pending: PendingCopy
    content: Tensor | None


class PagedReplica(Protocol):
    """The device's side."""

    def read_pages(self, blocks: U32, *, copied: bool = True) -> ReadPages: ...

    def write_pages(self, blocks: U32, pages: Tensor | PeerBlocks) -> PendingCopy: ...

    def commit_pages(self, blocks: U32, hashes: list[bytes]) -> PendingCopy: ...


class PageOutcomeHandler(Protocol):
    """Where what was done goes."""

    def is_current(self, receiver: Any) -> bool: ...

    def page_io_started(self, begun: PendingPageIO) -> None: ...

    def page_io_failed(self, order: PageOrder, error: Exception) -> None: ...


class PageOrderQueue:
    """On the device's thread."""

    def __init__(self, replica: PagedReplica, outcomes: PageOutcomeHandler) -> None:
        self._replica, self._outcomes = replica, outcomes
        self._last_step = 0  # of this attachment, launched
        self._parked: list[ReadBlocks] = []  # whose step has not come yet

    def process(self, order: PageOrder) -> None:
        if not self._outcomes.is_current(order.receiver):
            self._outcomes.page_io_failed(order, _attachment_ended())
        elif isinstance(order, ReadBlocks) and order.after_step > self._last_step:
            if not order.reply.cancelled():
                self._parked.append(order)
        else:
            self._begin(order)

    def step_launched(self, step_id: int) -> None:
        self._last_step = step_id
        if self._parked:
            parked, self._parked = self._parked, []
            for order in parked:
                self.process(order)

    def end_epoch(self) -> None:
        """An attachment is over."""
        self._last_step = 0
        parked, self._parked = self._parked, []
        for order in parked:
            self._outcomes.page_io_failed(order, _attachment_ended())

    def _begin(self, order: PageOrder) -> None:
        try:
            if isinstance(order, ReadBlocks):
                read = self._replica.read_pages(order.blocks, copied=order.copied)
                begun = PendingPageIO(order, read.pending, read.content)
            elif isinstance(order, WriteBlocks):
                begun = PendingPageIO(order, self._replica.write_pages(order.blocks, order.pages), None)
            else:
                begun = PendingPageIO(order, self._replica.commit_pages(order.blocks, order.hashes), None)
        except Exception as error:
            self._outcomes.page_io_failed(order, error)
            return
        self._outcomes.page_io_started(begun)


def _attachment_ended() -> FailedPrecondition:
    return FailedPrecondition("epoch: the attachment in which these blocks mean something is over")
