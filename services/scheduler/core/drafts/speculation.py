"""How many tokens each sequence may draft in a step, and what came of it.

The worker drafts; here is only decided how much of a step that may cost. Columns of `running` count drafts under way as
if all of them turned out right (`num_drafts_in_flight` says how many those are): a step that returns takes the others
back.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from quire.services.scheduler.core.drafts.counts import DraftCounts
from quire.services.scheduler.core.drafts.length import DraftLength
from quire.services.scheduler.core.plan import StepResult
from quire.services.scheduler.core.step.plan_builder import Flight


class DraftLengths:
    """Decides the length of drafts for all sequences of a step."""

    def __init__(self, num_speculative_tokens: int, *, fixed: bool, counts: DraftCounts) -> None:
        """`num_speculative_tokens`: most that the worker drafts; 0: it does not. `fixed`: always so many."""
        self.enabled = num_speculative_tokens > 0
        self.most = num_speculative_tokens
        self.counts = counts
        self.lengths = DraftLength(num_speculative_tokens, fixed=fixed)
        self._told = 0  # what the worker was last told

    @property
    def present_length(self) -> int:
        return self._told

    def waits_for(self, flights: Collection[Flight]) -> bool:
        """Before another step is planned."""
        return self.lengths.in_doubt and any(flight.drafts is not None for flight in flights)

    def length(self, num_ready: int, num_entering: int, budget: int) -> int:
        """Drafts per sequence for a step in which `num_ready` sequences advance, at most `budget` tokens in all; as
        many as are good for them together with the `num_entering` that come in now."""
        if num_ready == 0 or not self.enabled:
            return self.most
        length = self.lengths.choose(num_ready, num_entering)
        return length and max(0, min(length, budget // num_ready - 1))

    def learn(self, flight: Flight, result: StepResult, seconds: float) -> None:
        """A step returned, `seconds` after it began."""
        num_sequences = len(flight.slots)
        if not self.enabled or not num_sequences:
            return
        if flight.drafts is None and result.draft_counts is None:
            self.lengths.learn(num_sequences, 0, seconds, alone=flight.num_tokens == num_sequences, drafted=False)
            return
        length = 0 if flight.drafts is None else int(flight.drafts.max())
        if result.draft_counts is not None and result.token_counts is not None:
            self.lengths.learn_right(result.token_counts.astype(np.int64) - 1, length)
        elif length:
            self.lengths.learn_nothing_drafted(num_sequences, length)
        alone = flight.num_tokens == num_sequences * (1 + length)
        drafted = result.draft_counts is not None
        self.lengths.learn(num_sequences, length, seconds, alone=alone, drafted=drafted)

    def news(self, length: int) -> int | None:
        """What a plan has to say of it: nothing if it stays as it was."""
        if length == self._told:
            return None
        self._told = length
        return length
