"""How many tokens each sequence may draft in a step, and what came of it.

The worker drafts; here is only decided how much of a step that may cost. Columns of `running` count drafts under way as
if all of them turned out right (`num_drafts_in_flight` says how many those are): a step that returns takes the others
back.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from quire.services.scheduler.core.drafts.counts import DraftCounts
from quire.services.scheduler.core.drafts.length import DraftLengthTuner
from quire.services.scheduler.core.plan import StepResult
from quire.services.scheduler.core.step.plan_builder import InFlightStep


class DraftController:
    """Decides the length of drafts for all sequences of a step."""

    def __init__(self, num_speculative_tokens: int, *, fixed: bool, counts: DraftCounts) -> None:
        """`num_speculative_tokens`: most that the worker drafts; 0: it does not. `fixed`: always so many."""
        self.enabled = num_speculative_tokens > 0
        self.most = num_speculative_tokens
        self.counts = counts
        self.lengths = DraftLengthTuner(num_speculative_tokens, fixed=fixed)
        self._sent_length = 0  # what the worker was last told

    @property
    def current_length(self) -> int:
        return self._sent_length

    def must_wait_for(self, steps_in_flight: Collection[InFlightStep]) -> bool:
        """Before another step is planned."""
        return self.lengths.awaits_trial_result and any(flight.drafts is not None for flight in steps_in_flight)

    def length(self, num_ready: int, num_new_seqs: int, budget: int) -> int:
        """Drafts per sequence for a step in which `num_ready` sequences advance, at most `budget` tokens in all; as
        many as are good for them together with the `num_new_seqs` that come in now."""
        if num_ready == 0 or not self.enabled:
            return self.most
        length = self.lengths.choose(num_ready, num_new_seqs)
        return length and max(0, min(length, budget // num_ready - 1))

    def observe(self, flight: InFlightStep, result: StepResult, seconds: float) -> None:
        """A step returned, `seconds` after it began."""
        num_sequences = len(flight.slots)
        if not self.enabled or not num_sequences:
            return
        if flight.drafts is None and result.draft_counts is None:
            self.lengths.observe(num_sequences, 0, seconds, alone=flight.num_tokens == num_sequences, drafted=False)
            return
        length = 0 if flight.drafts is None else int(flight.drafts.max())
        if result.draft_counts is not None and result.token_counts is not None:
            self.lengths.observe_accepted(result.token_counts.astype(np.int64) - 1, length)
        elif length:
            self.lengths.observe_no_drafts(num_sequences, length)
        alone = flight.num_tokens == num_sequences * (1 + length)
        drafted = result.draft_counts is not None
        self.lengths.observe(num_sequences, length, seconds, alone=alone, drafted=drafted)

    def take_length_change(self, length: int) -> int | None:
        """What a plan has to say of it: nothing if it stays as it was."""
        if length == self._sent_length:
            return None
        self._sent_length = length
        return length
