"""Beam moves of a step: which beam continues from which parent, as the scheduler decided."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.services.worker.step.plan_violation import require
from quire.shared.columns import I32, U32

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class BeamMoves:
    """Beams (`slots`, ascending) that continue from their parents with `token_ids`; a parent also continues in its own
    slot."""

    slots: Rows
    parents: Rows
    token_ids: I32
    last_block_ids: U32  # per move, one for each KV group

    def check(self) -> None:
        """Raises PlanViolation if the columns disagree, slots do not ascend, or a parent does not continue itself."""
        slots, parents = self.slots, self.parents
        lengths = {len(part) for part in (slots, parents, self.token_ids)}
        require(len(lengths) == 1, lambda: f"beams: columns of {sorted(lengths)} elements")
        ascending = bool((slots[1:] > slots[:-1]).all()) and len(slots) > 0
        require(ascending, lambda: f"beams: slots do not ascend: {slots}")
        stay = slots[slots == parents]
        require(bool(np.isin(parents, stay).all()), lambda: f"beams: of the parents {parents} only {stay} stay")
