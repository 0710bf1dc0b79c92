"""Results of a step for slots that sample nothing: vectors, and scores of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import Array
from quire.services.worker.heads.late_interaction import LateInteractionScorer
from quire.services.worker.step.result import PooledColumns, StepResult
from quire.shared.columns import F32, I32
from quire.shared.errors import Internal, QuireError


@dataclass(slots=True)
class PooledStep:
    """Pooled vectors and scores of a step, on the device."""

    slots: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # elements of each slot
    vectors: list[Tensor] = field(default_factory=list)  # float32, in the order of `slots`
    failed: dict[int, QuireError] = field(default_factory=dict)  # documents that could not be scored, by slot

    def add(self, slots: Sequence[int], sizes: Sequence[int], vectors: Tensor) -> None:
        """Appends results of `slots`: `vectors` holds `sizes` elements for each, slot after slot."""
        self.slots += slots
        self.sizes += sizes
        self.vectors.append(vectors)

    def add_scores(self, late: LateInteractionScorer, slots: Sequence[int], vectors: Tensor, starts: I32) -> None:
        """Scores documents whose `vectors`, float32 [num_vectors, size], begin at `starts` [num_slots + 1], and appends
        one score each; documents that cannot be scored go to `failed`."""
        scored = late.score_documents(slots, vectors, starts)
        self.failed.update({slots[index]: error for index, error in scored.failed.items()})
        if scored.scores is not None:
            self.add([slots[index] for index in scored.scored], [1] * len(scored.scored), scored.scores)

    @property
    def tensors(self) -> list[Tensor]:
        return [torch.cat([part.flatten() for part in self.vectors])] if self.vectors else []

    def build_result(self, arrays: list[Array]) -> PooledVectors:
        """Returns the results on the host, reordered by ascending slots."""
        values: F32 = arrays[0] if arrays else np.zeros(0, np.float32)
        slots, sizes = self.slots, self.sizes
        if slots != sorted(slots):
            parts = [values[begin:end] for begin, end in pairwise(np.cumsum([0, *sizes]).tolist())]
            order = sorted(range(len(parts)), key=slots.__getitem__)
            values = np.concatenate([parts[i] for i in order])
            slots, sizes = [slots[i] for i in order], [sizes[i] for i in order]
        return PooledVectors(slots, sizes, values, self.failed)


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """Pooled vectors and scores of a step, on the host."""

    slots: list[int]
    sizes: list[int]
    values: F32  # concatenated
    failed: dict[int, QuireError]

    def merge_into(self, result: StepResult) -> StepResult:
        """Adds the vectors to `result`; a vector with NaN or infinity fails its sequence."""
        failures = [*result.failures, *self.failed.items()]
        if not self.slots:
            return result._replace(failures=failures)
        slots, sizes = np.array(self.slots, dtype=np.uint32), np.array(self.sizes, dtype=np.uint32)
        if not np.isfinite(self.values).all():
            vectors = np.split(self.values, np.cumsum(self.sizes)[:-1])
            for slot, vector in zip(self.slots, vectors, strict=True):
                if not np.isfinite(vector).all():
                    failures.append((slot, Internal("the pooled vector holds NaN or infinity")))
        pooled = _merged(result.pooled, PooledColumns(slots, sizes, self.values))
        return result._replace(failures=failures, pooled=pooled)


def _merged(before: PooledColumns | None, new: PooledColumns) -> PooledColumns:
    """Returns the vectors of two heads in one, slots ascending."""
    if before is None:
        return new
    slots, sizes = np.concatenate((before.slots, new.slots)), np.concatenate((before.sizes, new.sizes))
    parts = np.split(np.concatenate((before.values, new.values)), np.cumsum(sizes)[:-1])
    order = np.argsort(slots)
    return PooledColumns(slots[order], sizes[order], np.concatenate([parts[index] for index in order]))
