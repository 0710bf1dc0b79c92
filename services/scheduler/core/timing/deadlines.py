"""Deadlines of sequences, soonest first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from quire.services.scheduler.core.sequences.sequence import Sequence

MIN_HEAP_SIZE = 64  # entries that are kept without a clean-up


class Deadlines:
    """Heap of deadlines. Entries of finished sequences stay until the heap is much larger than the number of sequences:
    otherwise clients that allow ten minutes per call and are served within a second would fill it with ten minutes of
    calls."""

    def __init__(self, sequences: Mapping[int, Sequence]) -> None:
        """`sequences`: unfinished sequences by key, kept up to date by the owner."""
        self._sequences = sequences
        self._heap: list[tuple[float, int]] = []  # (deadline, key)
        self.soonest = math.inf  # deadline at the head of the heap, possibly of a finished sequence

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Adds the deadline of a sequence that has one; drops entries of finished sequences when the heap has become
        too large."""
        if len(self._heap) > MIN_HEAP_SIZE + 2 * len(self._sequences):
            self._heap = [entry for entry in self._heap if entry[1] in self._sequences]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (sequence.deadline, sequence.key))
        self.soonest = self._heap[0][0]

    def pop_expired(self, now: float) -> Iterator[Sequence]:
        """Removes and yields the unfinished sequences whose deadline is at or before `now` (seconds); the caller
        finishes them."""
        while self.soonest <= now:
            sequence = self._sequences.get(heapq.heappop(self._heap)[1])
            self.soonest = self._heap[0][0] if self._heap else math.inf
            if sequence is not None:
                yield sequence
