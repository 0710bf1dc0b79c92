"""What ranks do together: collectives of torch.distributed, and sums of our own over memory that GPUs share.

Sums of few bytes are one shot, each rank writing all it has to every other; those of more are two, each rank adding up
a chunk; the rest is NCCL's. The sizes are measured (peer_memory.py). Many rows are not added up behind a product but
beside it: the product is made in pieces of rows, and a piece is added up while the next one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from services.worker.ranks.peer_memory import Store, open_exchange, open_mailbox, two_shot_pays

if TYPE_CHECKING:
    from kernels.triton.rank_sums import Mailbox
    from kernels.triton.two_shot_sums import Exchange

# By the name that torch has for it: a newer one, or that of 2.11.
GATHER = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """Of rows that are made and added up one after the other."""

    least_rows: int  # of a piece
    most: int

    def of(self, num_rows: int) -> list[range]:
        """One if they are too few; all as long, but for the last."""
        count = max(1, min(self.most, num_rows // self.least_rows))
        size = max(1, -(-num_rows // count))
        return [range(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


# By device. The sum of the last piece is what nothing is computed beside; a product of fewer rows does not fill a GPU.
OVERLAP = {"cuda": Pieces(least_rows=1024, most=4)}


class Together:
    """In the order of the device's work."""

    def __init__(self, size: int, device: torch.device, group: Any = None, *, overlaps: bool = False) -> None:
        """`group`: None for that of all ranks. `overlaps`: sums of many rows are added up beside the products."""
        self._size, self._device, self._group = size, device, group
        self._mailbox: Mailbox | None = None
        self._exchange: Exchange | None = None
        self._pieces = OVERLAP.get(device.type) if overlaps else None
        self._side: torch.cuda.Stream | None = None  # where pieces are added up

    @property
    def joins_chains(self) -> bool:
        return self._mailbox is not None

    @property
    def has_two_shots(self) -> bool:
        return self._exchange is not None

    def open_peer_memory(self, store: Store, rank: int) -> None:
        """Sums are then the work of one kernel of our own, up to the size from which NCCL is faster, if all ranks can
        write to each other."""
        mailbox = open_mailbox(store, rank, self._size, self._device)
        if not self.least(int(mailbox is not None)):
            return
        self._mailbox = mailbox
        exchange = open_exchange(store, rank, self._size, self._device)
        if self.least(int(exchange is not None)):
            self._exchange = exchange

    def add_up(self, x: Tensor) -> Tensor:
        return self._sum(x.contiguous(), None)

    def add_up_into(self, residual: Tensor, x: Tensor, *, pdl: bool = False) -> None:
        self._sum(x.contiguous(), residual, pdl=pdl)

    def _sum(self, x: Tensor, residual: Tensor | None, *, pdl: bool = False) -> Tensor:
        """In place of the residual, or of `x`."""
        if self._mailbox is not None:
            from kernels.triton.rank_sums import sum_of_ranks, sum_of_ranks_takes

            if sum_of_ranks_takes(x, self._mailbox):
                return sum_of_ranks(x, self._mailbox, residual, pdl=pdl)
        if self._exchange is not None and two_shot_pays(x, self._size):
            from kernels.triton.two_shot_sums import two_shot_sum_of_ranks

            return two_shot_sum_of_ranks(x, self._exchange, residual)
        distributed.all_reduce(x, group=self._group)
        return x if residual is None else residual.add_(x)

    def add_up_made(self, rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        cuts = [] if self._pieces is None else self._pieces.of(rows.size(0))
        if len(cuts) < 2:
            return self.add_up(make(rows))
        made: list[Tensor] = []  # kept until all is added up: its memory is read beside what comes next
        sums, waits = rows, []
        for cut in cuts:
            made.append(make(rows[cut.start : cut.stop]).contiguous())
            if cut.start == 0:
                sums = made[0].new_empty(rows.size(0), *made[0].shape[1:])
            waits.append(self._begin(made[-1], sums[cut.start : cut.stop]))
        for wait in waits:
            wait()
        return sums

    def _begin(self, part: Tensor, out: Tensor) -> Callable[[], object]:
        """The sum of all ranks' parts goes to `out`, beside what comes next on the device; what comes behind a call of
        the result waits for it."""
        if self._exchange is not None and two_shot_pays(part, self._size):
            return self._begin_two_shots(part, out, self._exchange)
        out.copy_(part)
        work = distributed.all_reduce(out, group=self._group, async_op=True)
        assert work is not None, "this rank is one of the group"
        return work.wait

    def _begin_two_shots(self, part: Tensor, out: Tensor, exchange: Exchange) -> Callable[[], object]:
        from kernels.triton.two_shot_sums import two_shot_sum_of_ranks

        if self._side is None:  # before others, or it would wait for the products that it is to run beside
            self._side = torch.cuda.Stream(self._device, priority=-1)
        side, computing = self._side, torch.cuda.current_stream(self._device)
        side.wait_stream(computing)
        with torch.cuda.stream(side):
            two_shot_sum_of_ranks(part, exchange, out=out)
        done = side.record_event()
        return lambda: computing.wait_event(done)

    def side_by_side(self, x: Tensor) -> Tensor:
        return self.gather(x.contiguous()).transpose(0, 1).reshape(x.size(0), -1)

    def gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self._size * x.size(0), *x.shape[1:]))
        GATHER(parts, x, group=self._group)
        return parts.view(self._size, *x.shape)

    def from_first(self, x: Tensor) -> None:
        distributed.broadcast(x, group=self._group, group_src=0)

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        wanted = [(distributed.isend, *each) for each in sent] + [(distributed.irecv, *each) for each in received]
        works = [distributed.P2POp(do, tensor, group=self._group, group_peer=rank) for do, tensor, rank in wanted]
        for work in distributed.batch_isend_irecv(works) if works else ():
            work.wait()

    def least(self, value: int) -> int:
        shared = torch.tensor(value, dtype=torch.int64, device=self._device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MIN, group=self._group)
        return int(shared.item())
