"""Whose deadline is next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from quire.services.scheduler.core.sequences.sequence import Sequence

FEW = 64  # entries that are kept whoever they are of


class Deadlines:
    """A heap. Sequences that end before their deadline stay in it until it is much larger than it need be: clients that
    give each call ten minutes and have their answers after a second would else fill it with ten minutes of calls."""

    def __init__(self, sequences: Mapping[int, Sequence]) -> None:
        """`sequences`: that have not ended, by key; kept up to date by the owner."""
        self._sequences = sequences
        self._heap: list[tuple[float, int]] = []  # (deadline, key)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        if sequence.deadline == math.inf:
            return
        if len(self._heap) > FEW + 2 * len(self._sequences):
            self._heap = [entry for entry in self._heap if entry[1] in self._sequences]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (sequence.deadline, sequence.key))

    def pop_expired(self, now: float) -> Iterator[Sequence]:
        """Takes those that are over by `now`, of sequences that have not ended meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            sequence = self._sequences.get(heapq.heappop(self._heap)[1])
            if sequence is not None:
                yield sequence
