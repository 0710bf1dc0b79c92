"""Scheduling policy that admits the shortest prompt first."""

from __future__ import annotations

from quire.services.scheduler.core.policies.fcfs import Fcfs
from quire.services.scheduler.core.sequences.sequence import Sequence


class ShortestFirst(Fcfs):
    """Sorts on every call, which is acceptable for an example only."""

    def peek(self) -> Sequence:
        return min(self._queue.values(), key=lambda sequence: sequence.num_prompt_tokens)

    def pop(self) -> Sequence:
        sequence = self.peek()
        self.remove(sequence)
        return sequence
