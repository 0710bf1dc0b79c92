"""What the device's thread does with pages: reads them behind the step that fills them, writes what came."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from quire.services.worker.kv.host_memory import Moving
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
class BelieveBlocks:
    """All that was written into them is what was wanted."""

    receiver: Any
    blocks: U32
    hashes: list[bytes]
    reply: asyncio.Future[Any]


PageOrder = ReadBlocks | WriteBlocks | BelieveBlocks


@dataclass(frozen=True, slots=True)
class BegunPages:
    """On their way; `content` is what is replied once `moving` is done."""

    order: PageOrder
    moving: Moving
    content: Tensor | None


class PagedReplica(Protocol):
    """The device's side."""

    def read_pages(self, blocks: U32, *, copied: bool = True) -> ReadPages: ...

    def write_pages(self, blocks: U32, pages: Tensor | PeerBlocks) -> Moving: ...

    def believe_pages(self, blocks: U32, hashes: list[bytes]) -> Moving: ...


class PageOutlet(Protocol):
    """Where what was done goes."""

    def takes(self, receiver: Any) -> bool: ...

    def paging(self, begun: BegunPages) -> None: ...

    def not_paged(self, order: PageOrder, error: Exception) -> None: ...


class PageReads:
    """On the device's thread."""

    def __init__(self, replica: PagedReplica, outlet: PageOutlet) -> None:
        self._replica, self._outlet = replica, outlet
        self._last_step = 0  # of this attachment, launched
        self._parked: list[ReadBlocks] = []  # whose step has not come yet

    def obey(self, order: PageOrder) -> None:
        if not self._outlet.takes(order.receiver):
            self._outlet.not_paged(order, _over())
        elif isinstance(order, ReadBlocks) and order.after_step > self._last_step:
            if not order.reply.cancelled():
                self._parked.append(order)
        else:
            self._begin(order)

    def launched(self, step_id: int) -> None:
        self._last_step = step_id
        if self._parked:
            parked, self._parked = self._parked, []
            for order in parked:
                self.obey(order)

    def rest(self) -> None:
        """An attachment is over."""
        self._last_step = 0
        parked, self._parked = self._parked, []
        for order in parked:
            self._outlet.not_paged(order, _over())

    def _begin(self, order: PageOrder) -> None:
        try:
            if isinstance(order, ReadBlocks):
                read = self._replica.read_pages(order.blocks, copied=order.copied)
                begun = BegunPages(order, read.moving, read.content)
            elif isinstance(order, WriteBlocks):
                begun = BegunPages(order, self._replica.write_pages(order.blocks, order.pages), None)
            else:
                begun = BegunPages(order, self._replica.believe_pages(order.blocks, order.hashes), None)
        except Exception as error:
            self._outlet.not_paged(order, error)
            return
        self._outlet.paging(begun)


def _over() -> FailedPrecondition:
    return FailedPrecondition("epoch: the attachment in which these blocks mean something is over")
