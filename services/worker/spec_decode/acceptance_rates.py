"""Estimates how many drafts of each sequence will be accepted.

The load limits the length of all drafts; these estimates choose each sequence's length within that limit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

MIN_WORTHWHILE_RATE = 0.2  # least chance of a draft to be accepted: verifying it costs about this share of a CPU step
SMOOTHING = 0.15  # weight of each decided draft in the moving average
INITIAL_RATE = 0.7
MIN_RATE = 0.02
PROBE_INTERVAL = 12  # steps after which a sequence without worthwhile drafts gets one draft to re-estimate its rate


class SequenceAcceptanceRates:
    """Estimates by slot the probability that a draft is accepted if all drafts before it are."""

    def __init__(self, num_slots: int) -> None:
        self._rates: npt.NDArray[np.float64] = np.full(num_slots, INITIAL_RATE)
        self._steps_without_draft = np.zeros(num_slots, dtype=np.int32)  # steps since it last drafted
        self._mean_rate = INITIAL_RATE  # over all sequences: initial rate of a new one

    def reset(self, slot: int) -> None:
        """Starts the estimate of a new sequence in `slot` from the mean rate of all sequences, at least the worthwhile
        one."""
        self._rates[slot] = max(self._mean_rate, MIN_WORTHWHILE_RATE)
        self._steps_without_draft[slot] = 0

    def update(self, slots: Rows, drafted: I32, accepted: I32) -> None:
        """Moves the estimates of `slots`, of whose `drafted` tokens the first `accepted` were accepted, towards this
        step's rate; slots without drafts keep theirs."""
        has_drafts = drafted > 0
        slots, drafted, accepted = slots[has_drafts], drafted[has_drafts], accepted[has_drafts]
        if not len(slots):
            return
        decided = np.minimum(accepted + 1, drafted)  # drafts after the first wrong one tell nothing
        weight = 1 - (1 - SMOOTHING) ** decided
        self._rates[slots] += weight * (accepted / decided - self._rates[slots])
        self._mean_rate += SMOOTHING * (float(self._rates[slots].mean()) - self._mean_rate)

    def draft_lengths(self, slots: Rows) -> npt.NDArray[np.int64]:
        """Returns how many drafts of each of `slots` are likely enough to be accepted, [num_slots]: as many as are
        accepted together with a chance of MIN_WORTHWHILE_RATE. A slot with none gets one draft every PROBE_INTERVAL
        calls, which are counted here."""
        chance = np.clip(self._rates[slots], MIN_RATE, 0.99)
        lengths = (np.log(MIN_WORTHWHILE_RATE) / np.log(chance)).astype(np.int64)
        no_drafts = lengths == 0
        self._steps_without_draft[slots] = np.where(no_drafts, self._steps_without_draft[slots] + 1, 0)
        probe = no_drafts & (self._steps_without_draft[slots] >= PROBE_INTERVAL)
        self._steps_without_draft[slots[probe]] = 0
        worthwhile: npt.NDArray[np.int64] = np.where(probe, 1, lengths)
        return worthwhile
