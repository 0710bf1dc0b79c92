"""A scheduling policy: whoever has the shortest prompt comes first."""

from __future__ import annotations

from quire.services.scheduler.core.policies.fcfs import Fcfs
from quire.services.scheduler.core.sequences.sequence import Sequence


class ShortestFirst(Fcfs):
    """Sorts at every look, which is only right for an example."""

    def peek(self) -> Sequence:
        return min(self._queue.values(), key=lambda sequence: sequence.num_prompt_tokens)

    def pop(self) -> Sequence:
        sequence = self.peek()
        self.remove(sequence)
        return sequence
