"""How far each sequence's drafts can be trusted. Load decides how long drafts may be at most, this how long each is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

WORTHWHILE = 0.2  # least chance of a draft to be right: looking at it costs about so much of a step on a CPU
SMOOTHING = 0.15  # for each draft that was looked at and decided
AT_FIRST = 0.7
LEAST = 0.02
TRY_EVERY = 12  # steps in which a sequence without worthwhile drafts gets one all the same


class Agreement:
    """By slot: the chance that a draft is right whose predecessors are."""

    def __init__(self, num_slots: int) -> None:
        self._chance: npt.NDArray[np.float64] = np.full(num_slots, AT_FIRST)
        self._left_out = np.zeros(num_slots, dtype=np.int32)  # steps since it last drafted
        self._usual = AT_FIRST  # of all sequences: what a new one begins with

    def begin(self, slot: int) -> None:
        self._chance[slot] = max(self._usual, WORTHWHILE)
        self._left_out[slot] = 0

    def learn(self, slots: Rows, drafted: I32, accepted: I32) -> None:
        """`drafted` tokens of each of `slots`, of which the first `accepted` were right."""
        some = drafted > 0
        slots, drafted, accepted = slots[some], drafted[some], accepted[some]
        if not len(slots):
            return
        decided = np.minimum(accepted + 1, drafted)  # behind a wrong one nothing is known
        weight = 1 - (1 - SMOOTHING) ** decided
        self._chance[slots] += weight * (accepted / decided - self._chance[slots])
        self._usual += SMOOTHING * (float(self._chance[slots].mean()) - self._usual)

    def worthwhile(self, slots: Rows) -> npt.NDArray[np.int64]:
        """Drafts of each of `slots` that are likely enough to be right."""
        chance = np.clip(self._chance[slots], LEAST, 0.99)
        lengths = (np.log(WORTHWHILE) / np.log(chance)).astype(np.int64)
        idle = lengths == 0
        self._left_out[slots] = np.where(idle, self._left_out[slots] + 1, 0)
        due = idle & (self._left_out[slots] >= TRY_EVERY)
        self._left_out[slots[due]] = 0
        worthwhile: npt.NDArray[np.int64] = np.where(due, 1, lengths)
        return worthwhile
