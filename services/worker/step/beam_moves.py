"""What the beams of searches go on with, as the scheduler decided."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.services.worker.step.plan_violation import require
from quire.shared import columns
from quire.shared.columns import I32, U32
from quire.shared.pb.worker.v1 import worker_pb2 as pb

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class BeamMoves:
    """Each of `slots`, ascending, goes on from where its parent is; parents go on in their own."""

    slots: Rows
    parents: Rows
    token_ids: I32
    last_block_ids: U32  # of each move one for each KV group

    @classmethod
    def of(cls, plan: pb.StepPlan) -> BeamMoves | None:
        """None if there are none. Raises PlanViolation."""
        if not plan.HasField("beams"):
            return None
        wire = plan.beams
        parts = columns.u32(wire.slots), columns.u32(wire.parents), columns.i32(wire.token_ids)
        last = columns.u32(wire.last_block_ids)
        lengths = {len(part) for part in parts}
        require(len(lengths) == 1, lambda: f"beams: columns of {sorted(lengths)} elements")
        slots, parents, token_ids = parts
        ascending = bool((slots[1:] > slots[:-1]).all()) and len(slots) > 0
        require(ascending, lambda: f"beams: slots do not ascend: {slots}")
        stay = slots[slots == parents]
        require(bool(np.isin(parents, stay).all()), lambda: f"beams: of the parents {parents} only {stay} stay")
        return cls(slots.astype(np.intp), parents.astype(np.intp), token_ids.copy(), last)
