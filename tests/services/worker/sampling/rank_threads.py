"""Ranks as threads of the test: collectives exchange tensors through lists and count the traffic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.services.worker.layers.sharding import Shard

T = TypeVar("T")


class RankThreads:
    """Runs the same function on `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._brought: list[Any] = [None] * size
        self.sent: list[Tensor] = []  # tensors that the first rank sent
        self.swapped: list[list[Sequence[Tensor]]] = []  # per all-to-all: the parts of each rank for each rank

    def run(self, work: Callable[[Shard], T]) -> list[T]:
        """Returns the result of `work` on each rank's shard."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._run_rank, rank, work) for rank in range(self.size)]
            return [future.result() for future in futures]

    def exchanged(self, rank: int, x: Tensor) -> list[Tensor]:
        if rank == 0:
            self.sent.append(x)
        found = self._exchange(rank, x.clone())
        assert len({(each.shape, each.dtype) for each in found}) == 1, (
            "ranks pass equal shapes and dtypes to a collective"
        )
        return found

    def swap(self, rank: int, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns every rank's part for this rank."""
        found = self._exchange(rank, [part.clone() for part in parts])
        if rank == 0:
            self.swapped.append(found)
        return [each[rank] for each in found]

    def _exchange(self, rank: int, value: T) -> list[T]:
        self._brought[rank] = value
        self._barrier.wait()
        found = [*self._brought]
        self._barrier.wait()
        return found

    @property
    def num_sent(self) -> int:
        return sum(x.numel() for x in self.sent)

    def _run_rank(self, rank: int, work: Callable[[Shard], T]) -> T:
        try:
            return work(Shard(rank, self.size, _RankCollectives(self, rank)))
        except BaseException:
            self._barrier.abort()
            raise


class _RankCollectives:
    fuses_residual_add = fuses_rms_norm = False

    def __init__(self, threads: RankThreads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._threads.exchanged(self._rank, x)
        for other in others:
            first = first + other
        return first

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self._threads.size)[self._rank]

    def all_to_all(self, rows: Tensor, sent: list[int], into: Tensor, received: list[int]) -> None:
        for part, theirs in zip(into.split(received), self._threads.swap(self._rank, rows.split(sent)), strict=True):
            part.copy_(theirs)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._threads.exchanged(self._rank, x))

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return torch.cat(self._threads.exchanged(self._rank, x), dim=1)

    def all_reduce_add(self, residual: Tensor, x: Tensor, *, pdl: bool = False) -> None:
        raise AssertionError("samplers have no residual")

    def all_reduce_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        return None

    def overlapped_all_reduce(self, rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        raise AssertionError("samplers make no products")

    def min_over_ranks(self, value: int) -> int:
        raise AssertionError("samplers agree on nothing")

    def broadcast(self, x: Tensor) -> None:
        raise AssertionError("no rank knows more than others")

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        raise AssertionError("samplers hand over nothing")
