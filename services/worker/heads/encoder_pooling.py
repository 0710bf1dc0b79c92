"""Pools prompts that are computed in one step, as encoders do: all hidden states are available at once.

Prompts of a step with equal parameters are pooled together, in a few operations whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.heads import late_interaction
from quire.services.worker.heads.late_interaction import LateInteractionScorer
from quire.services.worker.heads.pooled_step import PooledStep
from quire.services.worker.heads.pooling import check_size, requested_places, token_places
from quire.services.worker.heads.sentence_head import SentenceHead
from quire.services.worker.layers.pooled_classifier import PooledClassifier
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared import columns
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import pooling_pb2

MODES = {
    pooling_pb2.POOLER_LAST: "last",
    pooling_pb2.POOLER_MEAN: "mean",
    pooling_pb2.POOLER_CLS: "cls",
    pooling_pb2.POOLER_ALL: "all",
    pooling_pb2.POOLER_STEP: "all",  # restricted to tokens with the step tag
}


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """Pooling parameters of a prompt, hashable: prompts of a step with equal ones are pooled together."""

    modes: tuple[str, ...]
    normalize: bool
    dimensions: int
    classify: bool
    late: str = ""  # "query" or "document"; empty: the vectors are returned to the client


QUERY, DOCUMENT = "query", "document"  # in order of computation


class SamplingRefusal:
    """Refuses the sequences that are to be sampled, which an encoder cannot do."""

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Raises InvalidArgument unless the sequence is pooled."""
        if admission.pooling is None:
            raise InvalidArgument("model: it is an encoder and generates no text", field="model")

    def release(self, slot: int) -> None:
        """Does nothing: slots have no state."""


class EncoderPoolingHead:
    """Head that pools the prompts of encoders, each computed in one step, with the parameters by slot."""

    parameters = frozenset({"pooling"})

    def __init__(
        self,
        hidden_size: int,
        default: SentenceHead,
        classifier: PooledClassifier | None,
        late: LateInteractionScorer | None = None,
    ) -> None:
        """`default`: the pooling that the model's folder defines; `late`: None if the model does not support late
        interaction."""
        self.late = late
        self._hidden_size = hidden_size
        self._default = default
        self._classifier = classifier
        self.specs: dict[int, VectorSpec] = {}
        self._places: dict[int, I32] = {}  # positions of tokens with a vector each, by slot

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the slot's pooling parameters, the positions of tokens with a vector each, and its late-interaction
        role. Raises InvalidArgument for parameters that the model does not support."""
        params = admission.pooling
        assert params is not None, "sequences that set no parameter of a head are not admitted to it"
        if params.pooler not in pooling_pb2.Pooler.values():
            raise InvalidArgument(f"pooling.pooler: {params.pooler} is not a pooler", field="pooling.pooler")
        if params.classify and self._classifier is None:
            raise InvalidArgument("pooling.classify: this model has no classifier", field="pooling.classify")
        if not (params.pooler or params.classify) and self._default.modes == ("all",):
            text = "pooling.pooler: the model has one vector per token, and none for the whole text; use POOLER_ALL"
            raise InvalidArgument(text, field="pooling.pooler")
        spec = self._classification(params) if params.classify else self._pooling(params)
        places = token_places(params.pooler, params, columns.i32(admission.token_ids))
        if places is not None and admission.pooled_tokens:
            places = requested_places(admission.pooled_tokens, len(places))
        if places is not None:
            check_size(len(places) * spec.dimensions)
            self._places[slot] = places
        late = late_interaction.admit(self.late, slot, admission, places is not None and not params.classify)
        if late is not None:
            spec = replace(spec, late=QUERY if late.is_query else DOCUMENT)
        self.specs[slot] = spec

    def _classification(self, params: pooling_pb2.PoolingParams) -> VectorSpec:
        """Returns the parameters of a classification, one score per class, pooled as requested or as the classifier
        does."""
        assert self._classifier is not None
        mode = MODES[params.pooler] if params.pooler else self._classifier.pooler
        return VectorSpec((mode,), False, self._classifier.num_classes, classify=True)

    def _pooling(self, params: pooling_pb2.PoolingParams) -> VectorSpec:
        """Returns the parameters of an embedding. A pooler other than the model's own replaces its further layers as
        well, which were not trained for it. Raises InvalidArgument for more dimensions than the model has."""
        default = self._default
        modes = (MODES[params.pooler],) if params.pooler else default.modes
        is_default = modes == default.modes
        size = default.size(self._hidden_size) if is_default else self._hidden_size
        if params.dimensions > size:
            text = f"pooling.dimensions: {params.dimensions} is more than the model's {size}"
            raise InvalidArgument(text, field="pooling.dimensions")
        normalize = params.normalize if params.HasField("normalize") else default.normalizes
        return VectorSpec(modes, normalize, params.dimensions or size, classify=False)

    def release(self, slot: int) -> None:
        self.specs.pop(slot, None)
        self._places.pop(slot, None)
        if self.late is not None:
            self.late.release(slot)

    def places(self, slot: int) -> I32:
        """Returns the positions of the slot's tokens that have a vector each."""
        return self._places[slot]

    def rows(self, inputs: StepInputs) -> EncoderPoolingRows | None:
        """Groups the step's pooled prompts by parameters, queries before the documents that are compared with them;
        None if there are none."""
        if not self.specs:
            return None
        by_spec: dict[VectorSpec, list[int]] = {}
        for row, slot in enumerate(inputs.slots.tolist()):
            if slot in self.specs:
                by_spec.setdefault(self.specs[slot], []).append(row)
        if any(spec.late for spec in by_spec):  # queries before the documents that are compared with them
            by_spec = dict(sorted(by_spec.items(), key=lambda entry: entry[0].late == DOCUMENT))
        return EncoderPoolingRows(self, inputs, by_spec) if by_spec else None

    def vectors(self, spec: VectorSpec, hidden: Tensor, starts: I32) -> Tensor:
        """Pools `hidden` [num_tokens, hidden_size] of prompts that begin at `starts` [num_rows + 1], then applies
        classifier, or dense layers, dimensions and normalisation. Returns float32 [num_vectors, dimensions], one vector
        per prompt or per token."""
        ends = upload(starts, hidden.device, np.int64)
        pooled = torch.cat([_pool(mode, hidden, ends) for mode in spec.modes], dim=1)
        if spec.classify:
            assert self._classifier is not None
            return self._classifier(pooled)
        if spec.modes == self._default.modes:
            pooled = self._default(pooled)
        pooled = pooled[:, : spec.dimensions]
        return torch.nn.functional.normalize(pooled, dim=1) if spec.normalize else pooled.contiguous()


def _pool(mode: str, hidden: Tensor, starts: Tensor) -> Tensor:
    """Pools the prompts that begin at `starts`, int64 [num_rows + 1], by one mode (last, cls, max, mean, mean_sqrt,
    weighted): float32 [num_rows, hidden_size]; mode all returns every token's state."""
    if mode == "all":
        return hidden.float()
    if mode == "cls":
        return hidden.index_select(0, starts[:-1]).float()
    if mode == "last":
        return hidden.index_select(0, starts[1:] - 1).float()
    lengths = starts.diff()
    states = hidden.float()
    if mode == "max":
        return torch.segment_reduce(states, "max", lengths=lengths)
    if mode == "weighted":
        weights = torch.arange(1, states.size(0) + 1, device=states.device) - starts[:-1].repeat_interleave(lengths)
        sums = torch.segment_reduce(states * weights.unsqueeze(1), "sum", lengths=lengths)
        return sums / (lengths * (lengths + 1) / 2).unsqueeze(1)
    sums = torch.segment_reduce(states, "sum", lengths=lengths)
    return sums / (lengths.sqrt() if mode == "mean_sqrt" else lengths).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class EncoderPoolingRows:
    """Head input: the pooled prompts of a step as row indices, grouped by pooling parameters."""

    _head: EncoderPoolingHead
    _inputs: StepInputs
    _rows: dict[VectorSpec, list[int]]

    @property
    def tokens(self) -> I32 | None:
        """Indices of the tokens that are read; None if all prompts have equal parameters and read all their tokens."""
        parts = [part for spec, rows in self._rows.items() for part in self._tokens_of(spec, rows)]
        tokens = np.concatenate(parts)
        return None if len(tokens) == self._inputs.num_tokens and len(self._rows) == 1 else tokens

    def _tokens_of(self, spec: VectorSpec, rows: Sequence[int]) -> list[I32]:
        """Returns, in one or more arrays, the indices of the step's tokens that pooling `rows` reads."""
        starts = self._inputs.query_start
        if spec.modes == ("cls",):
            return [starts[rows]]
        if spec.modes == ("last",):
            return [starts[[row + 1 for row in rows]] - 1]
        if spec.modes == ("all",):
            return [starts[row] + self._places(row) for row in rows]
        return [np.arange(starts[row], starts[row + 1], dtype=np.int32) for row in rows]

    def _places(self, row: int) -> I32:
        """Returns the positions of the row's tokens that have a vector each."""
        return self._head.places(int(self._inputs.slots[row]))

    def _counts(self, spec: VectorSpec, rows: Sequence[int]) -> I32:
        """Returns the number of tokens of each row that are read."""
        if spec.modes in (("cls",), ("last",)):
            return np.ones(len(rows), dtype=np.int32)
        if spec.modes == ("all",):
            return np.array([len(self._places(row)) for row in rows], dtype=np.int32)
        counts: I32 = np.diff(self._inputs.query_start)[rows]
        return counts

    def launch(self, hidden: Tensor) -> PooledStep:
        """Pools `hidden`, the states of `tokens` group after group; stores the vectors of queries, scores documents,
        and returns the other vectors."""
        step, at = PooledStep(), 0
        for spec, rows in self._rows.items():
            starts = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(self._counts(spec, rows), out=starts[1:])
            vectors = self._head.vectors(spec, hidden[at : at + int(starts[-1])], starts)
            at += int(starts[-1])
            slots = self._inputs.slots[rows].tolist()
            if spec.late == QUERY:
                self._late.store_queries(slots, vectors, starts)
            elif spec.late == DOCUMENT:
                step.add_scores(self._late, slots, vectors, starts)
            else:
                per_row = np.diff(starts) if spec.modes == ("all",) else np.ones(len(rows), dtype=np.int32)
                step.add(slots, (per_row * vectors.size(1)).tolist(), vectors)
        return step

    @property
    def _late(self) -> LateInteractionScorer:
        assert self._head.late is not None, "sequences were admitted with it"
        return self._head.late
