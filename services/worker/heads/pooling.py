"""One vector of a whole sequence (SequenceParams.pooling): the last token's hidden state, the first one's or the mean,
or what the model's classifier makes of it.

Hidden states are those behind the model's last norm. Steps cut a prompt into chunks, so that sums and first states are
kept by slot, in float32 on the device, until the chunk with the last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.device.staging import Array
from services.worker.layers.classifier import Classifier
from services.worker.step.admission import Admission
from services.worker.step.step_inputs import StepInputs
from shared import columns
from shared.columns import F32, I32
from shared.errors import Internal, InvalidArgument, to_proto
from shared.pb.common.v1 import pooling_pb2
from shared.pb.worker.v1 import worker_pb2 as pb

LAST, MEAN, CLS = pooling_pb2.POOLER_LAST, pooling_pb2.POOLER_MEAN, pooling_pb2.POOLER_CLS


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a slot asked for."""

    pooler: pooling_pb2.Pooler
    num_tokens: int
    normalize: bool
    dimensions: int
    classifier: Classifier | None


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of one slot's tokens."""

    asked: Pooled
    slot: int
    tokens: slice  # of the step, those that are read
    ends: bool  # with its last token


class PoolingHead:
    """By slot, until its tokens are computed."""

    def __init__(
        self, hidden_size: int, default: pooling_pb2.Pooler = LAST, classifier: Classifier | None = None
    ) -> None:
        """`default`: of sequences that leave the choice to the model."""
        self._hidden_size = hidden_size
        self._classifier = classifier
        self._default = default
        self._asked: dict[int, Pooled] = {}
        self._sums: dict[int, Tensor] = {}  # float32 [hidden_size]: of slots that are computed in several steps

    def admit(self, slot: int, admission: Admission) -> None:
        params = admission.pooling
        if params is None:
            return
        if params.pooler not in pooling_pb2.Pooler.values():
            raise InvalidArgument(f"pooling.pooler: {params.pooler} is none", field="pooling.pooler")
        if params.classify and self._classifier is None:
            raise InvalidArgument("pooling.classify: this model has no classifier", field="pooling.classify")
        if params.dimensions > self._hidden_size:
            text = f"pooling.dimensions: {params.dimensions} is more than the model's {self._hidden_size}"
            raise InvalidArgument(text, field="pooling.dimensions")
        pooler = params.pooler or self._default
        if pooler != LAST and admission.num_cached_tokens:
            name = pooling_pb2.Pooler.Name(pooler)
            cached = admission.num_cached_tokens
            text = f"pooling.pooler: {name} reads all of a sequence, and {cached} of its tokens are cached"
            raise InvalidArgument(text, field="pooling.pooler")
        num_tokens = len(admission.token_ids) // columns.NUMBER_BYTES
        normalize = params.normalize if params.HasField("normalize") else True
        classifier = self._classifier if params.classify else None
        size = (params.dimensions or self._hidden_size) if classifier is None else classifier.num_classes
        self._asked[slot] = Pooled(pooler, num_tokens, normalize, size, classifier)

    def release(self, slot: int) -> None:
        self._asked.pop(slot, None)
        self._sums.pop(slot, None)

    def rows(self, inputs: StepInputs) -> PoolingRows | None:
        if not self._asked:
            return None
        slots = inputs.slots.tolist()
        parts = [self._part(inputs, row, slot) for row, slot in enumerate(slots) if slot in self._asked]
        parts = [part for part in parts if part.tokens.start < part.tokens.stop or part.ends]
        return PoolingRows(self, parts) if parts else None

    def _part(self, inputs: StepInputs, row: int, slot: int) -> Part:
        asked = self._asked[slot]
        start, end = (int(at) for at in inputs.query_start[row : row + 2])
        ends = int(inputs.seq_lens[row]) == asked.num_tokens
        if asked.pooler == LAST:
            start = end - 1 if ends else end
        elif asked.pooler == CLS:
            end = start + (inputs.positions[start] == 0)
        return Part(asked, slot, slice(start, int(end)), ends)

    def pool(self, parts: list[Part], hidden: Tensor) -> PooledStep:
        """`hidden` [num_read, hidden_size]: those of the parts, one after the other."""
        vectors, done, at = [], [], 0
        for part in parts:
            count = part.tokens.stop - part.tokens.start
            total = self._added(part.slot, hidden[at : at + count])
            at += count
            if part.ends:
                vectors.append(_vector(part.asked, total))
                done.append(part)
            else:
                self._sums[part.slot] = total
        return PooledStep(done, vectors)

    def _added(self, slot: int, hidden: Tensor) -> Tensor:
        """float32 [hidden_size]: with what earlier steps found."""
        total = hidden.sum(dim=0, dtype=torch.float32)
        before = self._sums.pop(slot, None)
        return total if before is None else total.add_(before)


def _vector(asked: Pooled, total: Tensor) -> Tensor:
    """float32 [dimensions]"""
    total = total / asked.num_tokens if asked.pooler == MEAN else total
    if asked.classifier is not None:
        return asked.classifier(total)
    vector = total[: asked.dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if asked.normalize else vector


@dataclass(frozen=True, slots=True)
class PoolingRows:
    """The slots of a step that are pooled."""

    _head: PoolingHead
    _parts: list[Part]

    @property
    def tokens(self) -> I32:
        return np.concatenate([np.arange(p.tokens.start, p.tokens.stop, dtype=np.int32) for p in self._parts])

    def launch(self, hidden: Tensor) -> PooledStep:
        return self._head.pool(self._parts, hidden)


@dataclass(frozen=True, slots=True)
class PooledStep:
    """Vectors of the slots whose tokens are now computed."""

    done: list[Part]
    vectors: list[Tensor]  # float32 [dimensions] of each

    @property
    def tensors(self) -> list[Tensor]:
        return [torch.cat(self.vectors)] if self.vectors else []

    def answer(self, arrays: list[Array]) -> PooledVectors:
        values: F32 = arrays[0] if arrays else np.zeros(0, np.float32)
        return PooledVectors([part.slot for part in self.done], [part.asked.dimensions for part in self.done], values)


@dataclass(frozen=True, slots=True)
class PooledVectors:
    """The same on the host."""

    slots: list[int]
    sizes: list[int]
    values: F32  # one after the other

    def tell(self, result: pb.StepResult) -> None:
        """A vector with NaN or infinity fails its sequence."""
        if not self.slots:
            return
        result.pooled.slots = columns.u32_bytes(self.slots)
        result.pooled.sizes = columns.u32_bytes(self.sizes)
        result.pooled.values = columns.f32_bytes(self.values)
        vectors = np.split(self.values, np.cumsum(self.sizes)[:-1])
        for slot, vector in zip(self.slots, vectors, strict=True):
            if not np.isfinite(vector).all():
                error = Internal("the pooled vector holds NaN or infinity")
                result.failures.append(pb.SlotFailure(slot=slot, error=to_proto(error)))
