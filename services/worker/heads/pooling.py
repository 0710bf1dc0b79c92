"""Pools a sequence into one vector (SequenceParams.pooling): the last or first token's hidden state or the mean, or the
classifier's output; or into a vector per token, or per token with a certain id.

Hidden states are those after the model's last norm. Steps compute a prompt in chunks, so that sums, first states and
states of single tokens are kept by slot, in float32 on the device, until the chunk with the last token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.heads import late_interaction
from quire.services.worker.heads.late_interaction import LateInteractionScorer, LateRole
from quire.services.worker.heads.pooled_step import PooledStep
from quire.services.worker.heads.sentence_head import SentenceHead
from quire.services.worker.layers.classifier import Classifier
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared import columns
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import pooling_pb2
from quire.shared.worker_limits import MAX_POOLED_ELEMENTS

LAST, MEAN, CLS = pooling_pb2.POOLER_LAST, pooling_pb2.POOLER_MEAN, pooling_pb2.POOLER_CLS
ALL, STEP = pooling_pb2.POOLER_ALL, pooling_pb2.POOLER_STEP


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """Pooling parameters of a slot, as resolved on admission."""

    pooler: pooling_pb2.Pooler
    num_tokens: int
    normalize: bool
    dimensions: int
    classifier: Classifier | None
    places: I32 | None = None  # positions of tokens with a vector each, ascending; None: one vector for all
    late: LateRole | None = None  # None: the vectors are returned to the client

    @property
    def size(self) -> int:
        """Total number of elements of its vectors."""
        return self.dimensions * (1 if self.places is None else len(self.places))

    @property
    def kind(self) -> tuple[Classifier | None, bool, int]:
        """Key of sequences whose pooled states become vectors in the same way."""
        return self.classifier, self.normalize, self.dimensions


@dataclass(frozen=True, slots=True)
class PoolingChunk:
    """Tokens of one slot that a step computes."""

    spec: PoolingSpec
    slot: int
    tokens: I32  # indices into the step's tokens, those that are read
    is_last: bool  # contains the sequence's last token


class PoolingHead:
    """Head that pools sequences of decoders. Prompts are computed in chunks, so that it keeps sums or states by slot
    until the last token is computed."""

    def __init__(
        self,
        hidden_size: int,
        default: pooling_pb2.Pooler = LAST,
        classifier: Classifier | None = None,
        *,
        normalizes: bool = True,
        by_token: SentenceHead | None = None,
        late: LateInteractionScorer | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """`default`, `normalizes`: for sequences that leave the choice to the model. `by_token`: layers after the
        hidden state of each single token; `late`: None if the model does not support late interaction.
        `batch_invariant`: each vector is computed alone, because the number of rows may change its last bits."""
        self._batch_invariant = batch_invariant
        self._by_token, self._late = by_token, late
        self._normalizes = normalizes
        self._hidden_size = hidden_size
        self._classifier = classifier
        self._default = default
        self.specs: dict[int, PoolingSpec] = {}
        # State of slots that are computed in several steps: float32 [hidden_size] sums, or the states so far.
        self._sums: dict[int, Tensor] = {}
        self._states: dict[int, list[Tensor]] = {}

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the slot's pooling parameters and late-interaction role; does nothing for a sequence that is sampled.
        Raises InvalidArgument for unsupported parameters, and for a pooler that reads tokens which are cached and not
        computed."""
        params = admission.pooling
        if params is None:
            return
        if params.pooler not in pooling_pb2.Pooler.values():
            raise InvalidArgument(f"pooling.pooler: {params.pooler} is not a pooler", field="pooling.pooler")
        if params.classify and self._classifier is None:
            raise InvalidArgument("pooling.classify: this model has no classifier", field="pooling.classify")
        pooler = params.pooler or self._default
        max_dimensions = self._hidden_size
        if self._by_token is not None and pooler in (ALL, STEP):
            max_dimensions = self._by_token.size(max_dimensions)
        if params.dimensions > max_dimensions:
            text = f"pooling.dimensions: {params.dimensions} is more than the model's {max_dimensions}"
            raise InvalidArgument(text, field="pooling.dimensions")
        if pooler != LAST and admission.num_cached_tokens:
            name = pooling_pb2.Pooler.Name(pooler)
            cached = admission.num_cached_tokens
            text = f"pooling.pooler: {name} reads the whole sequence, but {cached} of its tokens are cached"
            raise InvalidArgument(text, field="pooling.pooler")
        num_tokens = len(admission.token_ids) // columns.NUMBER_BYTES
        normalize = params.normalize if params.HasField("normalize") else self._normalizes
        classifier = self._classifier if params.classify else None
        size = (params.dimensions or max_dimensions) if classifier is None else classifier.num_classes
        places = token_places(pooler, params, columns.i32(admission.token_ids))
        if places is not None and admission.pooled_tokens:
            places = requested_places(admission.pooled_tokens, len(places))
        by_token = places is not None and classifier is None
        late = late_interaction.admit(self._late, slot, admission, by_token)
        spec = PoolingSpec(pooler, num_tokens, normalize, size, classifier, places, late)
        check_size(spec.size)
        self.specs[slot] = spec

    def release(self, slot: int) -> None:
        self.specs.pop(slot, None)
        self._sums.pop(slot, None)
        self._states.pop(slot, None)
        if self._late is not None:
            self._late.release(slot)

    def rows(self, inputs: StepInputs) -> PoolingRows | None:
        """Returns the chunks of pooled sequences that this step reads or completes, None if there are none."""
        slots = inputs.slots.tolist()
        parts = [self._part(inputs, row, slot) for row, slot in enumerate(slots) if slot in self.specs]
        parts = [part for part in parts if len(part.tokens) or part.is_last]
        return PoolingRows(self, parts) if parts else None

    def _part(self, inputs: StepInputs, row: int, slot: int) -> PoolingChunk:
        """Selects the tokens of one slot that the pooler reads in this step: those with a vector each, the last, the
        first, or all."""
        spec = self.specs[slot]
        start, end = (int(at) for at in inputs.query_start[row : row + 2])
        ends = int(inputs.seq_lens[row]) == spec.num_tokens
        if spec.places is not None:
            first = int(inputs.positions[start])
            positions = spec.places[(spec.places >= first) & (spec.places < first + end - start)]
            return PoolingChunk(spec, slot, (positions - first + start).astype(np.int32), ends)
        if spec.pooler == LAST:
            start = end - 1 if ends else end
        elif spec.pooler == CLS:
            end = start + (inputs.positions[start] == 0)
        return PoolingChunk(spec, slot, np.arange(start, end, dtype=np.int32), ends)

    def pool(self, parts: list[PoolingChunk], hidden: Tensor) -> PooledStep:
        """Pools `hidden` [num_read, >= hidden_size], the concatenated hidden states of `parts`: adds incomplete chunks
        to the state of their slots, and returns vectors and scores of complete sequences."""
        step, at = PooledStep(), 0
        compared: list[tuple[PoolingChunk, Tensor]] = []
        for together in self._groups(parts):
            count = sum(len(part.tokens) for part in together)
            states = hidden[at : at + count, : self._hidden_size]
            at += count
            first = together[0]
            pooled = self._by_place(first, states) if first.spec.places is not None else self._whole(together, states)
            if pooled is not None and first.spec.late is not None:
                compared.append((first, pooled))
            elif pooled is not None:
                step.add([part.slot for part in together], [part.spec.size for part in together], pooled)
        if compared:
            self._compare(compared, step)
        return step

    def _groups(self, parts: list[PoolingChunk]) -> Iterator[list[PoolingChunk]]:
        """Groups adjacent parts whose vectors are computed together: launching a kernel for each of a hundred short
        texts takes longer than computing the texts. With batch_invariant every part is alone."""
        together: list[PoolingChunk] = []
        for part in parts:
            if together and not (_can_group(part, together[-1]) and not self._batch_invariant):
                yield together
                together = []
            together.append(part)
        if together:
            yield together

    def _compare(self, compared: list[tuple[PoolingChunk, Tensor]], step: PooledStep) -> None:
        """Caches the vectors of queries, then scores the documents against them into `step`; tensors are float32
        [num_places, dimensions], grouped by their size."""
        assert self._late is not None, "sequences were admitted with it"
        groups: dict[tuple[bool, int], list[tuple[int, Tensor]]] = {}  # by (is document, vector size)
        for part, pooled in compared:
            assert part.spec.late is not None, "the part has a role"
            groups.setdefault((not part.spec.late.is_query, pooled.size(1)), []).append((part.slot, pooled))
        for (is_document, _), group in sorted(groups.items(), key=itemgetter(0)):
            slots, vectors = [slot for slot, _ in group], torch.cat([pooled for _, pooled in group])
            starts = np.cumsum([0, *(len(pooled) for _, pooled in group)]).astype(np.int32)
            if is_document:
                step.add_scores(self._late, slots, vectors, starts)
            else:
                self._late.store_queries(slots, vectors, starts)

    def _by_place(self, part: PoolingChunk, states: Tensor) -> Tensor | None:
        """Keeps a copy of the chunk's states for the slot; returns float32 [num_places, dimensions] of all chunks once
        the slot's last token is computed, else None."""
        kept = self._states.setdefault(part.slot, [])
        kept.append(states.to(torch.float32, copy=True))  # the next step overwrites the buffer
        return self._vectors(part.spec, torch.cat(kept)) if part.is_last else None

    def _whole(self, parts: list[PoolingChunk], states: Tensor) -> Tensor | None:
        """Returns float32 [num_parts, dimensions] of complete parts of one kind; for a part that is not complete stores
        its sum and returns None."""
        if all(len(part.tokens) == 1 and part.slot not in self._sums for part in parts) and parts[0].is_last:
            return _finish_vectors(parts[0].spec, states.float())
        totals, at = [], 0
        for part in parts:
            total = self._add_to_sum(part.slot, states[at : at + len(part.tokens)])
            at += len(part.tokens)
            if not part.is_last:
                self._sums[part.slot] = total
                return None
            totals.append(total / part.spec.num_tokens if part.spec.pooler == MEAN else total)
        return _finish_vectors(parts[0].spec, torch.stack(totals))

    def _vectors(self, spec: PoolingSpec, states: Tensor) -> Tensor:
        """Applies the classifier, or the layers for single tokens, dimensions and normalisation: states [num_places,
        hidden_size] to float32 [num_places, dimensions]."""
        if spec.classifier is not None:
            return spec.classifier(states.t()).t()
        vectors = states if self._by_token is None else self._by_token(states)
        vectors = vectors[:, : spec.dimensions]
        return torch.nn.functional.normalize(vectors, dim=1) if spec.normalize else vectors

    def _add_to_sum(self, slot: int, hidden: Tensor) -> Tensor:
        """Returns float32 [hidden_size]: the sum of `hidden` [num_tokens, hidden_size] and of the sequence's earlier
        chunks, whose stored sum it removes."""
        total = hidden.sum(dim=0, dtype=torch.float32)
        before = self._sums.pop(slot, None)
        return total if before is None else total.add_(before)


def token_places(pooler: pooling_pb2.Pooler, params: pooling_pb2.PoolingParams, token_ids: I32) -> I32 | None:
    """Returns the positions of tokens with a vector each, ascending: all for ALL, those with the step tag for STEP;
    None for poolers with one vector. Raises InvalidArgument if STEP has no tag or the tag does not occur."""
    if pooler == ALL:
        return np.arange(len(token_ids), dtype=np.int32)
    if pooler != STEP:
        return None
    if not params.HasField("step_tag_id"):
        raise InvalidArgument("pooling.step_tag_id: required by POOLER_STEP", field="pooling.step_tag_id")
    places: I32 = np.flatnonzero(token_ids == params.step_tag_id).astype(np.int32)
    if not len(places):
        text = f"pooling.step_tag_id: {params.step_tag_id} does not occur in the sequence"
        raise InvalidArgument(text, field="pooling.step_tag_id")
    return places


def requested_places(column: bytes, num_tokens: int) -> I32:
    """Decodes `column`, the requested positions as u32. Raises InvalidArgument unless they ascend below
    `num_tokens`."""
    if len(column) % columns.NUMBER_BYTES:
        raise InvalidArgument("params: pooled_tokens is not a column of u32", field="params")
    places = columns.u32(column).astype(np.int64)
    if places[-1] >= num_tokens or (np.diff(places) <= 0).any():
        text = f"params: pooled_tokens must ascend below {num_tokens}, the prompt's tokens"
        raise InvalidArgument(text, field="params")
    return places.astype(np.int32)


def check_size(size: int) -> None:
    """Raises InvalidArgument if a sequence has more elements than its result may hold."""
    if size > MAX_POOLED_ELEMENTS:
        text = (
            f"pooling: the vectors have {size} elements, the limit is {MAX_POOLED_ELEMENTS}; request fewer dimensions"
        )
        raise InvalidArgument(text, field="pooling")


def _can_group(part: PoolingChunk, other: PoolingChunk) -> bool:
    """Tells whether both parts are complete and get one vector of the same kind each."""
    whole = part.is_last and other.is_last and part.spec.places is None and other.spec.places is None
    return whole and part.spec.kind == other.spec.kind


def _finish_vectors(spec: PoolingSpec, totals: Tensor) -> Tensor:
    """Applies the classifier, or dimensions and normalisation: pooled states [num_parts, hidden_size] to float32
    [num_parts, dimensions]."""
    if spec.classifier is not None:
        return spec.classifier(totals.t()).t()
    vectors = totals[:, : spec.dimensions]
    return torch.nn.functional.normalize(vectors, dim=1) if spec.normalize else vectors


@dataclass(frozen=True, slots=True)
class PoolingRows:
    """Chunks of a step that PoolingHead pools, in the order of slots."""

    _head: PoolingHead
    _parts: list[PoolingChunk]

    @property
    def tokens(self) -> I32:
        return np.concatenate([part.tokens for part in self._parts])

    def launch(self, hidden: Tensor) -> PooledStep:
        return self._head.pool(self._parts, hidden)
