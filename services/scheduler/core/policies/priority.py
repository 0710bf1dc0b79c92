"""Smaller priority values first, then order of arrival. The victim is the last in that order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from services.scheduler.core.running import Running, Slots
from services.scheduler.core.sequence import Sequence

Rank = tuple[int, float, int]


class Priority:
    """A heap; removed sequences drop out of it lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int]] = []
        self._waiting: dict[int, Sequence] = {}

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.key] = sequence
        heapq.heappush(self._heap, (_rank(sequence), sequence.key))

    push_back = push  # its rank is what it was

    def peek(self) -> Sequence:
        while self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0][1]]

    def pop(self) -> Sequence:
        sequence = self.peek()
        heapq.heappop(self._heap)
        del self._waiting[sequence.key]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.key]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._waiting.values(), key=_rank))

    def victim(self, running: Running) -> int:
        slots = np.flatnonzero(running.live).tolist()
        return int(max(slots, key=lambda slot: _rank(running.sequence(slot))))

    def charge_prompt(self, sequence: Sequence, num_uncached_tokens: int) -> None:
        pass

    def charge_output(self, running: Running, slots: Slots) -> None:
        pass


def _rank(sequence: Sequence) -> Rank:
    return sequence.priority, sequence.arrival, sequence.order
