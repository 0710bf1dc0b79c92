"""Layers of which each continues what the one before it made: multi-token prediction modules (DeepSeek-V3, arXiv
2412.19437, section 2.2), or one layer alone.

Module k makes of the feature of place i that module k - 1 made (the model, where k is 1) and of token i + k a feature
of place i, which says token i + k + 1. It keeps KV of place i at that place of a layer of its own. With known tokens
each module comes a place less far than the one before it, whose latest feature waits for the next token. Drafts take
all modules to the last place; what these write on the way is overwritten once tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.kv.kv_memory import BlockShape
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.spec_decode.draft_models.draft_passes import DraftPasses, spread
from quire.services.worker.spec_decode.draft_models.draft_sampler import DraftSampler
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32


class FeatureLayer(Protocol):
    def __call__(self, model: CausalLM, features: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """`features` [num_tokens, hidden_size] -> what it makes of them and the tokens, of `batch.logit_tokens`."""


class FeatureDrafter(Protocol):
    """The weights, and what of the model they go with."""

    @property
    def model(self) -> CausalLM: ...

    @property
    def heads(self) -> Sequence[FeatureLayer]:
        """The k-th is for the k-th draft, the last also for those behind its own."""

    @property
    def place(self) -> LayerPlacement: ...

    @property
    def shape(self) -> BlockShape:
        """Of the heads' own KV."""

    def logits(self, features: Tensor, depth: int = 0) -> Tensor:
        """Of what the head with `depth` others before it has made, [num_rows, vocab_size]"""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Positions of slots that a head is to see, `counts` of each from `starts` on, and the tokens that go with them."""

    slots: Rows
    starts: I32
    counts: I32  # at least 1
    token_ids: I32  # of all places, slot after slot
    before: I32  # places right before that the first head has seen, without a hole

    def next_run(self, depth: int) -> tuple[HeadRun, I32] | None:
        """What the head with `depth` others before it comes to then, if anything, and which feature goes with each
        place: by row, first of those that the head before it has just made, then of the slots' that waited."""
        waits = self.before >= depth  # else its first place is the first one that was seen
        firsts, lacking = np.cumsum(self.counts) - self.counts, (~waits).astype(np.int32)
        counts = self.counts - lacking
        left = np.flatnonzero(counts > 0)
        if not len(left):
            return None
        counts, waits = counts[left], waits[left]
        sources = spread((firsts - 1 + lacking)[left], counts)[1]
        sources[(np.cumsum(counts) - counts)[waits]] = len(self.token_ids) + left[waits]
        token_ids = self.token_ids[spread((firsts + lacking)[left], counts)[1]]
        starts = (self.starts - 1 + lacking)[left]
        return HeadRun(self.slots[left], starts, counts, token_ids, self.before[left]), sources


class ModuleChain:
    """The heads' KV, and of each slot the latest feature that each made of known tokens."""

    def __init__(self, drafter: FeatureDrafter, passes: DraftPasses, limits: WorkerLimits, size: int) -> None:
        """`size`: of features"""
        place, num_slots = drafter.place, limits.max_num_seqs
        self._drafter, self._passes, self._device = drafter, passes, place.device
        self.caches = kv_cache.allocate(drafter.shape, limits.num_blocks, place.device)
        assert len(self.caches) == len(drafter.heads), "a layer of KV for each head"
        self._ends = np.full(num_slots, -1, dtype=np.int32)  # behind the last place that the first head has seen
        self._num_seen = np.zeros(num_slots, dtype=np.int32)  # places up to there, without a hole
        shape = len(drafter.heads), num_slots, size
        self._features: Tensor = torch.zeros(shape, dtype=place.dtype, device=place.device)

    def copy_blocks(self, copies: BlockCopies) -> None:
        kv_cache.copy_blocks(self.caches, copies)

    def start_sequence(self, slot: int) -> None:
        self._ends[slot], self._num_seen[slot] = -1, 0

    def features(self, slots: Rows) -> Tensor:
        """The first head's, [num_slots, size]"""
        return self._features[0, self._up(slots)]

    def can_draft(self, slots: Rows, lengths: I32) -> npt.NDArray[np.bool_]:
        """Whether the last place was seen of sequences of `lengths` tokens, and before it as many as heads wait for."""
        enough = self._num_seen[slots] >= len(self._drafter.heads) - 1
        can: npt.NDArray[np.bool_] = (self._ends[slots] == lengths - 1) & enough
        return can

    def process_features(self, slots: Rows, starts: I32, counts: I32, token_ids: I32, features: Tensor) -> None:
        """The model's features of `counts` places of each of `slots`, from `starts` on, and the tokens behind these."""
        before = np.where(self._ends[slots] == starts, self._num_seen[slots], 0)
        self._ends[slots], self._num_seen[slots] = starts + counts, before + counts
        run, heads = HeadRun(slots, starts, counts, token_ids, before), self._drafter.heads
        for depth, (head, cache) in enumerate(zip(heads, self.caches, strict=True)):
            batch, at = self._passes.known(run.slots, run.starts, run.counts, run.token_ids), self._up(run.slots)
            if depth == len(heads) - 1:
                self._features[depth, at] = head(self._drafter.model, features, batch, cache)
                return
            made = head(self._drafter.model, features, replace(batch, logit_tokens=None), cache)
            every = torch.cat((made, self._features[depth, at]))
            self._features[depth, at] = made if batch.logit_tokens is None else made.index_select(0, batch.logit_tokens)
            behind = run.next_run(depth + 1)
            if behind is None:
                return
            run, sources = behind
            features = every.index_select(0, self._up(sources))

    def draft(self, draws: DraftSampler, slots: Rows, lengths: I32, counts: I32) -> None:
        """Up to `counts` tokens of each of `slots`, whose sequences have `lengths` of them, are drawn."""
        drafter, heads, at = self._drafter, self._drafter.heads, self._up(slots)
        features = self._features[0, at]
        tokens = [draws.draw(drafter.logits(features))]
        made = features.view(len(slots), 1, -1)[:, :0]  # of places that drafts reach, by the head before
        for depth in range(1, min(len(heads), int(counts.max()))):
            given = torch.cat((self._features[depth - 1, at].unsqueeze(1), made), dim=1)
            behind = torch.stack(tokens, dim=1).flatten()
            batch = self._passes.known(slots, lengths - 1 - depth, np.full_like(counts, depth), behind)
            every = replace(batch, logit_tokens=None)
            made = heads[depth](drafter.model, given.flatten(0, 1), every, self.caches[depth])
            made = made.view(len(slots), depth, -1)
            features = made[:, -1].contiguous()
            tokens.append(draws.draw(drafter.logits(features, depth)))
        last, token_ids = len(heads) - 1, tokens[-1]
        for batch in self._passes.drafts(slots, lengths - 1, np.maximum(counts - len(heads), 0)):
            given_tokens = replace(batch, token_ids=token_ids)
            features = heads[last](drafter.model, features, given_tokens, self.caches[last])
            token_ids = draws.draw(drafter.logits(features, last))

    def _up(self, array: object) -> Tensor:
        return upload(np.asarray(array), self._device)
