"""Smaller priority values first, then order of arrival. The preemption victim is the last in that order.

With aging, each `priority_aging_s` of waiting makes a sequence more urgent by one level. All waiting sequences age
alike and running ones keep their rank, so the order never changes: it is the order of priority + arrival /
priority_aging_s, which is known on arrival. A sequence never waits for one that arrives later than the difference of
their levels times priority_aging_s, so no sequence starves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from quire.services.scheduler.core.policies.policy import DEFAULTS, PolicyOptions
from quire.services.scheduler.core.running.running import Mask, Running, Slots
from quire.services.scheduler.core.sequences.sequence import Sequence

Rank = tuple[float, float, int]


class Priority:
    """Heap of waiting sequences; removed sequences are dropped from it lazily."""

    def __init__(self, options: PolicyOptions = DEFAULTS) -> None:
        self._aging_s = options.priority_aging_s
        self._heap: list[tuple[Rank, int]] = []
        self._waiting: dict[int, Sequence] = {}

    def push(self, sequence: Sequence) -> None:
        """Computes the sequence's urgency from its priority and, with aging, its arrival, and adds it to the heap."""
        sequence.urgency = sequence.priority + (sequence.arrival / self._aging_s if self._aging_s else 0.0)
        self._waiting[sequence.key] = sequence
        heapq.heappush(self._heap, (_rank(sequence), sequence.key))

    push_back = push  # the rank of a sequence never changes

    def peek(self) -> Sequence:
        """Returns the most urgent sequence, dropping removed ones from the heap; only valid while the queue is not
        empty."""
        while self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0][1]]

    def next_for(self, running: Running) -> Sequence | None:
        """Returns the next sequence, since no slot is reserved; None if none waits."""
        return self.peek() if len(self) else None

    def end_admission(self) -> None:
        """Does nothing: nothing is passed over."""

    def pop(self) -> Sequence:
        """Removes and returns the most urgent sequence; only valid while the queue is not empty."""
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
        """Returns the slot of the least urgent running sequence, the newest of equals."""
        slots = np.flatnonzero(running.live).tolist()
        return int(max(slots, key=lambda slot: _rank(running.sequence(slot))))

    def counted(self, running: Running, newcomer: Sequence) -> Mask:
        """Returns the running sequences that are at least as urgent: the others are preempted when the newcomer needs
        their blocks."""
        counted: Mask = running.live & (running.urgency <= newcomer.urgency)
        return counted

    def charge_prompt(self, sequence: Sequence, num_uncached_tokens: int) -> None:
        pass

    def charge_output(self, running: Running, slots: Slots) -> None:
        pass


def _rank(sequence: Sequence) -> Rank:
    return sequence.urgency, sequence.arrival, sequence.order
