"""One vector of a whole sequence (SequenceParams.pooling): the last token's hidden state, the first one's or the mean,
or what the model's classifier makes of it; or one of each token, or of each that has a certain id.

Hidden states are those behind the model's last norm. Steps cut a prompt into chunks, so that sums and first states are
kept by slot, in float32 on the device, until the chunk with the last token; so are the states of single tokens.
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
from shared.worker_limits import MOST_POOLED_ELEMENTS

LAST, MEAN, CLS = pooling_pb2.POOLER_LAST, pooling_pb2.POOLER_MEAN, pooling_pb2.POOLER_CLS
ALL, STEP = pooling_pb2.POOLER_ALL, pooling_pb2.POOLER_STEP


@dataclass(frozen=True, slots=True)
class Pooled:
    """What a slot asked for."""

    pooler: pooling_pb2.Pooler
    num_tokens: int
    normalize: bool
    dimensions: int
    classifier: Classifier | None
    places: I32 | None = None  # of tokens that have a vector each, ascending; None: there is one of all

    @property
    def size(self) -> int:
        """Elements of its vectors together."""
        return self.dimensions * (1 if self.places is None else len(self.places))


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of one slot's tokens."""

    asked: Pooled
    slot: int
    tokens: I32  # of the step, those that are read
    ends: bool  # with its last token


class PoolingHead:
    """By slot, until its tokens are computed."""

    def __init__(
        self,
        hidden_size: int,
        default: pooling_pb2.Pooler = LAST,
        classifier: Classifier | None = None,
        *,
        normalizes: bool = True,
    ) -> None:
        """`default`, `normalizes`: of sequences that leave the choice to the model."""
        self._normalizes = normalizes
        self._hidden_size = hidden_size
        self._classifier = classifier
        self._default = default
        self._asked: dict[int, Pooled] = {}
        # Of slots that are computed in several steps: float32 [hidden_size] sums, or the states so far.
        self._sums: dict[int, Tensor] = {}
        self._states: dict[int, list[Tensor]] = {}

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
        normalize = params.normalize if params.HasField("normalize") else self._normalizes
        classifier = self._classifier if params.classify else None
        size = (params.dimensions or self._hidden_size) if classifier is None else classifier.num_classes
        places = token_places(pooler, params, columns.i32(admission.token_ids))
        asked = Pooled(pooler, num_tokens, normalize, size, classifier, places)
        check_size(asked.size)
        self._asked[slot] = asked

    def release(self, slot: int) -> None:
        self._asked.pop(slot, None)
        self._sums.pop(slot, None)
        self._states.pop(slot, None)

    def rows(self, inputs: StepInputs) -> PoolingRows | None:
        if not self._asked:
            return None
        slots = inputs.slots.tolist()
        parts = [self._part(inputs, row, slot) for row, slot in enumerate(slots) if slot in self._asked]
        parts = [part for part in parts if len(part.tokens) or part.ends]
        return PoolingRows(self, parts) if parts else None

    def _part(self, inputs: StepInputs, row: int, slot: int) -> Part:
        asked = self._asked[slot]
        start, end = (int(at) for at in inputs.query_start[row : row + 2])
        ends = int(inputs.seq_lens[row]) == asked.num_tokens
        if asked.places is not None:
            first = int(inputs.positions[start])
            here = asked.places[(asked.places >= first) & (asked.places < first + end - start)]
            return Part(asked, slot, (here - first + start).astype(np.int32), ends)
        if asked.pooler == LAST:
            start = end - 1 if ends else end
        elif asked.pooler == CLS:
            end = start + (inputs.positions[start] == 0)
        return Part(asked, slot, np.arange(start, end, dtype=np.int32), ends)

    def pool(self, parts: list[Part], hidden: Tensor) -> PooledStep:
        """`hidden` [num_read, hidden_size or more]: those of the parts, one after the other."""
        vectors, done, at = [], [], 0
        for part in parts:
            count = len(part.tokens)
            found = self._of_part(part, hidden[at : at + count, : self._hidden_size])
            at += count
            if found is not None:
                vectors.append(found)
                done.append(part)
        return PooledStep(done, vectors)

    def _of_part(self, part: Part, hidden: Tensor) -> Tensor | None:
        """float32 [size], once the slot's last token is computed."""
        if part.asked.places is not None:
            states = self._states.setdefault(part.slot, [])
            states.append(hidden.float())
            return _vectors(part.asked, torch.cat(states)) if part.ends else None
        total = self._added(part.slot, hidden)
        if part.ends:
            return _vector(part.asked, total)
        self._sums[part.slot] = total
        return None

    def _added(self, slot: int, hidden: Tensor) -> Tensor:
        """float32 [hidden_size]: with what earlier steps found."""
        total = hidden.sum(dim=0, dtype=torch.float32)
        before = self._sums.pop(slot, None)
        return total if before is None else total.add_(before)


def token_places(pooler: pooling_pb2.Pooler, params: pooling_pb2.PoolingParams, token_ids: I32) -> I32 | None:
    """Which tokens have a vector each, ascending; None where there is one of all. Raises InvalidArgument."""
    if pooler == ALL:
        return np.arange(len(token_ids), dtype=np.int32)
    if pooler != STEP:
        return None
    if not params.HasField("step_tag_id"):
        raise InvalidArgument("pooling.step_tag_id: it is needed for POOLER_STEP", field="pooling.step_tag_id")
    places: I32 = np.flatnonzero(token_ids == params.step_tag_id).astype(np.int32)
    if not len(places):
        text = f"pooling.step_tag_id: {params.step_tag_id} is none of the sequence's tokens"
        raise InvalidArgument(text, field="pooling.step_tag_id")
    return places


def check_size(size: int) -> None:
    """Raises InvalidArgument for more elements than may be told of a sequence."""
    if size > MOST_POOLED_ELEMENTS:
        text = f"pooling: its vectors have {size} elements, the limit is {MOST_POOLED_ELEMENTS}; see dimensions"
        raise InvalidArgument(text, field="pooling")


def _vectors(asked: Pooled, states: Tensor) -> Tensor:
    """float32 [size] of states [num_places, hidden_size]"""
    if asked.classifier is not None:
        return asked.classifier(states.t()).t().flatten()
    vectors = states[:, : asked.dimensions]
    return (torch.nn.functional.normalize(vectors, dim=1) if asked.normalize else vectors).flatten()


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
        return np.concatenate([part.tokens for part in self._parts])

    def launch(self, hidden: Tensor) -> PooledStep:
        return self._head.pool(self._parts, hidden)


@dataclass(frozen=True, slots=True)
class PooledStep:
    """Vectors of the slots whose tokens are now computed."""

    done: list[Part]
    vectors: list[Tensor]  # float32 [size] of each

    @property
    def tensors(self) -> list[Tensor]:
        return [torch.cat(self.vectors)] if self.vectors else []

    def answer(self, arrays: list[Array]) -> PooledVectors:
        values: F32 = arrays[0] if arrays else np.zeros(0, np.float32)
        return PooledVectors([part.slot for part in self.done], [part.asked.size for part in self.done], values)


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
