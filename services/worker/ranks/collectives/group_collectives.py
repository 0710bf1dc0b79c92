"""Collectives of a group of ranks: those of torch.distributed, and custom all-reduce kernels over shared GPU memory.

Small all-reduces are one-shot: each rank writes its part to all others. Larger ones are two-shot: each rank sums one
chunk. The rest uses NCCL. The thresholds are measured (peer_memory.py). An all-reduce of many rows may overlap with the
matrix product that computes them (copy_engine_sums.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, distributed

from quire.services.worker.ranks.collectives.peer_memory import (
    RankStore,
    open_copy_engine_sums,
    open_exchange,
    open_mailbox,
    uses_two_shot,
)

if TYPE_CHECKING:
    from quire.kernels.triton.rank_sums import RankMailbox
    from quire.kernels.triton.two_shot_sums import SumExchange

# Names of newer torch versions, else those of 2.11.
GATHER = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
SCATTER = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class OverlappedSums(Protocol):
    """All-reduce of pieces of rows, overlapped with computing the next piece."""

    def is_peer_ready(self) -> bool:
        """Returns whether all other ranks have signalled; valid after their openers have returned."""

    def cuts(self, num_rows: int) -> list[range]:
        """Returns the pieces worth overlapping, in order; one piece if none is."""

    def overlapped_all_reduce(self, rows: Tensor, cuts: list[range], make: Callable[[Tensor], Tensor]) -> Tensor: ...


# Openers by device type; each returns None where this rank cannot, and the ranks agree on the outcome.
OVERLAPPED_SUMS: dict[str, Callable[[RankStore, int, int, torch.device], OverlappedSums | None]] = {
    "cuda": open_copy_engine_sums
}


class GroupCollectives:
    """Implements Collectives for a group of ranks, in the order of the device's work: custom kernels for sums where
    they are open, else torch.distributed. All ranks must make the same calls."""

    def __init__(self, size: int, device: torch.device, group: Any = None) -> None:
        """Creates collectives that use torch.distributed until custom ones are opened. `size`: ranks of the process
        group `group`; None: all ranks."""
        self._size, self._device, self._group = size, device, group
        self._mailbox: RankMailbox | None = None
        self._exchange: SumExchange | None = None
        self._overlapped: OverlappedSums | None = None

    @property
    def fuses_residual_add(self) -> bool:
        return self._mailbox is not None

    @property
    def fuses_rms_norm(self) -> bool:
        return self._mailbox is not None and self._overlapped is None  # overlapped sums have no fused norm

    @property
    def has_two_shots(self) -> bool:
        return self._exchange is not None

    @property
    def has_overlapped_sums(self) -> bool:
        """Whether all-reduces of many rows overlap with their products."""
        return self._overlapped is not None

    def open_peer_memory(self, store: RankStore, rank: int) -> None:
        """Shares GPU memory with the other ranks and from then on uses custom all-reduce kernels below the size from
        which NCCL is faster. Changes nothing unless all ranks can write to each other; every rank must call it."""
        mailbox = open_mailbox(store, rank, self._size, self._device)
        if not self.min_over_ranks(int(mailbox is not None)):
            return
        self._mailbox = mailbox
        exchange = open_exchange(store, rank, self._size, self._device)
        if self.min_over_ranks(int(exchange is not None)):
            self._exchange = exchange

    def open_overlapped_sums(self, store: RankStore, rank: int) -> None:
        """Makes overlapped_all_reduce() overlap many rows with their products. Changes nothing unless all ranks can;
        every rank must call it."""
        opener = OVERLAPPED_SUMS.get(self._device.type)
        if opener is None:
            return
        overlapped = opener(store, rank, self._size, self._device)
        if self.min_over_ranks(int(overlapped is not None)) and self.min_over_ranks(
            int(overlapped is not None and overlapped.is_peer_ready())
        ):
            self._overlapped = overlapped

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks, which may replace `x`."""
        return self._sum(x.contiguous(), None)

    def all_reduce_add(self, residual: Tensor, x: Tensor, *, pdl: bool = False) -> None:
        """Adds the sum over ranks of `x` to `residual` in place. `pdl`: in a chain of kernels that wait for their
        inputs."""
        self._sum(x.contiguous(), residual, pdl=pdl)

    def all_reduce_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Adds the sum over ranks of `x` to `residual` in place and returns its RMS norm, in one kernel; returns None,
        having done nothing, where that kernel does not support the sizes."""
        if self._mailbox is None:
            return None
        from quire.kernels.triton.normed_sums import normed_sum_of_ranks, normed_sum_takes

        if not normed_sum_takes(x, weight, self._mailbox):
            return None
        return normed_sum_of_ranks(x.contiguous(), self._mailbox, residual, weight, eps)

    def _sum(self, x: Tensor, residual: Tensor | None, *, pdl: bool = False) -> Tensor:
        """Sums `x` over ranks, by the fastest method for its size, into `residual` if given, else into `x`; returns the
        changed tensor."""
        if self._mailbox is not None:
            from quire.kernels.triton.rank_sums import sum_of_ranks, sum_of_ranks_takes

            if sum_of_ranks_takes(x, self._mailbox):
                return sum_of_ranks(x, self._mailbox, residual, pdl=pdl)
        if self._exchange is not None and uses_two_shot(x, self._size):
            from quire.kernels.triton.two_shot_sums import two_shot_sum_of_ranks

            return two_shot_sum_of_ranks(x, self._exchange, residual)
        distributed.all_reduce(x, group=self._group)
        return x if residual is None else residual.add_(x)

    def overlapped_all_reduce(self, rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the sum over ranks of make(rows), overlapped if there are enough rows, else one all-reduce."""
        overlapped = self._overlapped
        cuts = [] if overlapped is None else overlapped.cuts(rows.size(0))
        if overlapped is None or len(cuts) < 2:
            return self.all_reduce(make(rows))
        return overlapped.overlapped_all_reduce(rows, cuts, make)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sums over ranks and returns this rank's block of rows: [rows, ...] -> [rows / size, ...]."""
        own = x.new_empty((x.size(0) // self._size, *x.shape[1:]))
        SCATTER(own, x.contiguous(), group=self._group)
        return own

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """Gathers the columns of all ranks in rank order: [rows, n] -> [rows, size * n]."""
        return self.all_gather(x).transpose(0, 1).reshape(x.size(0), -1)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers every rank's `x` in rank order: [...] -> [size, ...]."""
        parts = x.new_empty((self._size * x.size(0), *x.shape[1:]))
        GATHER(parts, x.contiguous(), group=self._group)
        return parts.view(self._size, *x.shape)

    def broadcast(self, x: Tensor) -> None:
        """Overwrites `x` with that of the group's rank 0."""
        distributed.broadcast(x, group=self._group, group_src=0)

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        """Sends and receives (tensor, rank in the group) pairs point to point, and waits for them."""
        wanted = [(distributed.isend, *each) for each in sent] + [(distributed.irecv, *each) for each in received]
        works = [distributed.P2POp(do, tensor, group=self._group, group_peer=rank) for do, tensor, rank in wanted]
        for work in distributed.batch_isend_irecv(works) if works else ():
            work.wait()

    def all_to_all(self, rows: Tensor, sent: list[int], into: Tensor, received: list[int]) -> None:
        """Sends `sent[i]` consecutive rows to rank i and receives `received[i]` rows of each into `into`, in rank
        order."""
        distributed.all_to_all_single(into, rows.contiguous(), received, sent, group=self._group)

    def min_over_ranks(self, value: int) -> int:
        """Returns the least value over all ranks; waits for the device."""
        shared = torch.tensor(value, dtype=torch.int64, device=self._device)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MIN, group=self._group)
        return int(shared.item())
