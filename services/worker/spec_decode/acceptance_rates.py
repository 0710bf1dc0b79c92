"""How far each sequence's drafts can be trusted. Load decides how long drafts may be at most, this how long each is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

MIN_WORTHWHILE_RATE = 0.2  # least chance of a draft to be right: looking at it costs about so much of a step on a CPU
SMOOTHING = 0.15  # for each draft that was looked at and decided
INITIAL_RATE = 0.7
MIN_RATE = 0.02
PROBE_INTERVAL = 12  # steps in which a sequence without worthwhile drafts gets one all the same


class MethodAcceptanceRates:
    """By slot: the chance that a draft is right whose predecessors are."""

    def __init__(self, num_slots: int) -> None:
        self._rates: npt.NDArray[np.float64] = np.full(num_slots, INITIAL_RATE)
        self._steps_without_draft = np.zeros(num_slots, dtype=np.int32)  # steps since it last drafted
        self._mean_rate = INITIAL_RATE  # of all sequences: what a new one begins with

    def reset(self, slot: int) -> None:
        self._rates[slot] = max(self._mean_rate, MIN_WORTHWHILE_RATE)
        self._steps_without_draft[slot] = 0

    def update(self, slots: Rows, drafted: I32, accepted: I32) -> None:
        """`drafted` tokens of each of `slots`, of which the first `accepted` were right."""
        some = drafted > 0
        slots, drafted, accepted = slots[some], drafted[some], accepted[some]
        if not len(slots):
            return
        decided = np.minimum(accepted + 1, drafted)  # behind a wrong one nothing is known
        weight = 1 - (1 - SMOOTHING) ** decided
        self._rates[slots] += weight * (accepted / decided - self._rates[slots])
        self._mean_rate += SMOOTHING * (float(self._rates[slots].mean()) - self._mean_rate)

    def draft_lengths(self, slots: Rows) -> npt.NDArray[np.int64]:
        """Drafts of each of `slots` that are likely enough to be right."""
        chance = np.clip(self._rates[slots], MIN_RATE, 0.99)
        lengths = (np.log(MIN_WORTHWHILE_RATE) / np.log(chance)).astype(np.int64)
        idle = lengths == 0
        self._steps_without_draft[slots] = np.where(idle, self._steps_without_draft[slots] + 1, 0)
        due = idle & (self._steps_without_draft[slots] >= PROBE_INTERVAL)
        self._steps_without_draft[slots[due]] = 0
        worthwhile: npt.NDArray[np.int64] = np.where(due, 1, lengths)
        return worthwhile
