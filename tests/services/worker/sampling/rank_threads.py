"""Ranks that are threads of the test: collectives are lists that all fill, and what crosses is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.services.worker.layers.sharding import Shard

T = TypeVar("T")


class Meeting:
    """Of `size` ranks, each of which does the same."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._brought: list[Any] = [None] * size
        self.sent: list[Tensor] = []  # by the first rank
        self.swapped: list[list[Sequence[Tensor]]] = []  # by swap: what each rank has for each

    def hold(self, work: Callable[[Shard], T]) -> list[T]:
        """What each rank makes of its shard."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._attend, rank, work) for rank in range(self.size)]
            return [future.result() for future in futures]

    def exchanged(self, rank: int, x: Tensor) -> list[Tensor]:
        if rank == 0:
            self.sent.append(x)
        found = self._met(rank, x.clone())
        assert len({(each.shape, each.dtype) for each in found}) == 1, "ranks bring the same to a collective"
        return found

    def swap(self, rank: int, parts: Sequence[Tensor]) -> list[Tensor]:
        """What every rank has for this one."""
        found = self._met(rank, [part.clone() for part in parts])
        if rank == 0:
            self.swapped.append(found)
        return [each[rank] for each in found]

    def _met(self, rank: int, brought: T) -> list[T]:
        self._brought[rank] = brought
        self._barrier.wait()
        found = [*self._brought]
        self._barrier.wait()
        return found

    @property
    def num_sent(self) -> int:
        return sum(x.numel() for x in self.sent)

    def _attend(self, rank: int, work: Callable[[Shard], T]) -> T:
        try:
            return work(Shard(rank, self.size, _Attendance(self, rank)))
        except BaseException:
            self._barrier.abort()
            raise


class _Attendance:
    joins_chains = norms_sums = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def add_up(self, x: Tensor) -> Tensor:
        first, *others = self._meeting.exchanged(self._rank, x)
        for other in others:
            first = first + other
        return first

    def add_up_own(self, x: Tensor) -> Tensor:
        return self.add_up(x).chunk(self._meeting.size)[self._rank]

    def swap(self, rows: Tensor, sent: list[int], into: Tensor, received: list[int]) -> None:
        for part, theirs in zip(into.split(received), self._meeting.swap(self._rank, rows.split(sent)), strict=True):
            part.copy_(theirs)

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchanged(self._rank, x))

    def side_by_side(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchanged(self._rank, x), dim=1)

    def add_up_into(self, residual: Tensor, x: Tensor, *, pdl: bool = False) -> None:
        raise AssertionError("samplers have no residual")

    def add_up_normed(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        return None

    def add_up_made(self, rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        raise AssertionError("samplers make no products")

    def least(self, value: int) -> int:
        raise AssertionError("samplers agree on nothing")

    def from_first(self, x: Tensor) -> None:
        raise AssertionError("no rank knows more than others")

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        raise AssertionError("samplers hand over nothing")
