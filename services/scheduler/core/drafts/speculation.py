"""Controls how many tokens each sequence may draft in a step, and records the results.

The worker drafts; the scheduler only decides how much of a step drafts may use. The columns of `running` count drafts
in flight as if all of them were accepted (`num_drafts_in_flight` says how many those are); the result of a step
subtracts the rejected ones.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from quire.services.scheduler.core.drafts.counts import DraftCounts
from quire.services.scheduler.core.drafts.length import DraftLengthTuner
from quire.services.scheduler.core.plan import StepResult
from quire.services.scheduler.core.step.plan_builder import InFlightStep


class DraftController:
    """Chooses the draft length of each step by a DraftLengthTuner, and passes the results of steps to it."""

    def __init__(self, num_speculative_tokens: int, *, fixed: bool, counts: DraftCounts) -> None:
        """`num_speculative_tokens`: maximum drafts of the worker per sequence; 0: it does not draft. `fixed`: always
        use the maximum."""
        self.enabled = num_speculative_tokens > 0
        self.most = num_speculative_tokens
        self.counts = counts
        self.lengths = DraftLengthTuner(num_speculative_tokens, fixed=fixed)
        self._sent_length = 0  # the length of the last plan that named one

    @property
    def current_length(self) -> int:
        return self._sent_length

    def must_wait_for(self, steps_in_flight: Collection[InFlightStep]) -> bool:
        """Returns whether a step in flight has to return before the next one is planned: a trial's first result decides
        the next length."""
        return self.lengths.awaits_trial_result and any(flight.drafts is not None for flight in steps_in_flight)

    def length(self, num_ready: int, num_new_seqs: int, budget: int) -> int:
        """Returns the drafts per sequence for a step that advances `num_ready` sequences within `budget` tokens; the
        length suits them together with the `num_new_seqs` that are admitted in it."""
        if num_ready == 0 or not self.enabled:
            return self.most
        length = self.lengths.choose(num_ready, num_new_seqs)
        return length and max(0, min(length, budget // num_ready - 1))

    def observe(self, flight: InFlightStep, result: StepResult, seconds: float) -> None:
        """Passes a step that returned `seconds` after it started to the tuner: its draft length, its accepted drafts
        and whether it did other work. Only for workers that draft; does nothing if no slot sampled."""
        num_sequences = len(flight.slots)
        if not num_sequences:
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
        """Returns the draft length for the plan and remembers it as sent; None if the last plan that named one named
        the same."""
        if length == self._sent_length:
            return None
        self._sent_length = length
        return length
