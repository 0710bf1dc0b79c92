"""First come, first served. The preemption victim is the sequence that loses the least work."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from quire.services.scheduler.core.policies.policy import DEFAULTS, PolicyOptions, least_work_lost
from quire.services.scheduler.core.running.running import Mask, Running, Slots
from quire.services.scheduler.core.sequences.sequence import Sequence


class Fcfs:
    """FIFO queue; preempted sequences return to its head. Priorities and tenants have no effect."""

    def __init__(self, options: PolicyOptions = DEFAULTS) -> None:
        self._queue: OrderedDict[int, Sequence] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        self._queue[sequence.key] = sequence

    def push_back(self, sequence: Sequence) -> None:
        self._queue[sequence.key] = sequence
        self._queue.move_to_end(sequence.key, last=False)

    def peek(self) -> Sequence:
        return next(iter(self._queue.values()))

    def next_for(self, running: Running) -> Sequence | None:
        """Returns the next sequence, since no slot is reserved; None if none waits."""
        return self.peek() if len(self) else None

    def end_admission(self) -> None:
        """Does nothing: nothing is passed over."""

    def pop(self) -> Sequence:
        return self._queue.popitem(last=False)[1]

    def remove(self, sequence: Sequence) -> None:
        del self._queue[sequence.key]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue.values())

    def victim(self, running: Running) -> int:
        """Returns the slot of the running sequence that loses the least work."""
        return least_work_lost(running, np.flatnonzero(running.live))

    def counted(self, running: Running, newcomer: Sequence) -> Mask:
        """Returns all running sequences: none is preempted for a newcomer."""
        return running.live

    def charge_prompt(self, sequence: Sequence, num_uncached_tokens: int) -> None:
        pass

    def charge_output(self, running: Running, slots: Slots) -> None:
        pass
