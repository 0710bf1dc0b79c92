"""Runs a chain of layers of which each continues the features of the previous one: multi-token prediction modules
(DeepSeek-V3, arXiv 2412.19437, section 2.2), or a single layer.

Module k computes a feature of position i from the feature of position i of module k - 1 (the model, for k = 1) and
token i + k; it predicts token i + k + 1. Its KV of position i lies at that position of its own layer. On known tokens
each module advances one position less than the previous one, whose latest feature waits for the next token. Drafting
takes all modules to the last position; the KV written for drafts is overwritten once the tokens are known.
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
    """Drafting layer that computes features one position further from features and tokens."""

    def __call__(self, model: CausalLM, features: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Returns features for `batch.logit_tokens` from `features` [num_tokens, hidden_size] and the batch's
        tokens."""


class FeatureDrafter(Protocol):
    """Loaded layers of a drafting method, in order, and the parts of the served model that they use."""

    @property
    def model(self) -> CausalLM: ...

    @property
    def heads(self) -> Sequence[FeatureLayer]:
        """Layers in order: the k-th makes the k-th draft, the last one also all later drafts."""

    @property
    def place(self) -> LayerPlacement: ...

    @property
    def shape(self) -> BlockShape:
        """Shape of the heads' KV blocks."""

    def logits(self, features: Tensor, depth: int = 0) -> Tensor:
        """Returns the logits of the features of the `depth`-th head, counted from 0: [num_rows, vocab_size]."""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Input of one head: `counts` positions of each slot from `starts` on, and the tokens that are combined with
    them."""

    slots: Rows
    starts: I32
    counts: I32  # at least 1
    token_ids: I32  # of all positions, slot after slot
    before: I32  # contiguous positions right before `starts` that the first head has processed

    def next_run(self, depth: int) -> tuple[HeadRun, I32] | None:
        """Returns the input of the head at `depth` and the source of each position's feature, or None if it has no
        input.

        Sources are rows: first of the features that the previous head has just computed, then of the slots' waiting
        features.
        """
        waits = self.before >= depth  # else its first position is the first one that was processed
        firsts, lacking = np.cumsum(self.counts) - self.counts, (~waits).astype(np.int32)
        counts = self.counts - lacking
        remaining = np.flatnonzero(counts > 0)
        if not len(remaining):
            return None
        counts, waits = counts[remaining], waits[remaining]
        sources = spread((firsts - 1 + lacking)[remaining], counts)[1]
        sources[(np.cumsum(counts) - counts)[waits]] = len(self.token_ids) + remaining[waits]
        token_ids = self.token_ids[spread((firsts + lacking)[remaining], counts)[1]]
        starts = (self.starts - 1 + lacking)[remaining]
        return HeadRun(self.slots[remaining], starts, counts, token_ids, self.before[remaining]), sources


class ModuleChain:
    """Owns the heads' KV, and by slot the latest feature that each head computed from known tokens, [num_heads,
    num_slots, size]."""

    def __init__(self, drafter: FeatureDrafter, passes: DraftPasses, limits: WorkerLimits, size: int) -> None:
        """`size`: width of a feature."""
        place, num_slots = drafter.place, limits.max_num_seqs
        self._drafter, self._passes, self._device = drafter, passes, place.device
        self.caches = kv_cache.allocate(drafter.shape, limits.num_blocks, place.device)
        assert len(self.caches) == len(drafter.heads), "a layer of KV for each head"
        self._ends = np.full(num_slots, -1, dtype=np.int32)  # end of the positions that the first head has processed
        self._num_seen = np.zeros(num_slots, dtype=np.int32)  # contiguous positions up to there
        shape = len(drafter.heads), num_slots, size
        self._features: Tensor = torch.zeros(shape, dtype=place.dtype, device=place.device)

    def copy_blocks(self, copies: BlockCopies) -> None:
        kv_cache.copy_blocks(self.caches, copies)

    def start_sequence(self, slot: int) -> None:
        self._ends[slot], self._num_seen[slot] = -1, 0

    def features(self, slots: Rows) -> Tensor:
        """Returns the first head's latest features, [num_slots, size]."""
        return self._features[0, self._upload(slots)]

    def can_draft(self, slots: Rows, lengths: I32) -> npt.NDArray[np.bool_]:
        """Returns, by slot, whether the last position of the sequence of `lengths` tokens was processed, and enough
        contiguous positions before it for all heads."""
        has_enough = self._num_seen[slots] >= len(self._drafter.heads) - 1
        can: npt.NDArray[np.bool_] = (self._ends[slots] == lengths - 1) & has_enough
        return can

    def process_features(self, slots: Rows, starts: I32, counts: I32, token_ids: I32, features: Tensor) -> None:
        """Runs the heads on the model's `features` of `counts` positions of each of `slots` from `starts` on, and the
        tokens that follow them; stores each head's latest feature and KV. A head without input ends the chain."""
        before = np.where(self._ends[slots] == starts, self._num_seen[slots], 0)
        self._ends[slots], self._num_seen[slots] = starts + counts, before + counts
        run, heads = HeadRun(slots, starts, counts, token_ids, before), self._drafter.heads
        for depth, (head, cache) in enumerate(zip(heads, self.caches, strict=True)):
            batch, rows = self._passes.known(run.slots, run.starts, run.counts, run.token_ids), self._upload(run.slots)
            if depth == len(heads) - 1:
                self._features[depth, rows] = head(self._drafter.model, features, batch, cache)
                return
            computed = head(self._drafter.model, features, replace(batch, logit_tokens=None), cache)
            every = torch.cat((computed, self._features[depth, rows]))
            self._features[depth, rows] = (
                computed if batch.logit_tokens is None else computed.index_select(0, batch.logit_tokens)
            )
            following = run.next_run(depth + 1)
            if following is None:
                return
            run, sources = following
            features = every.index_select(0, self._upload(sources))

    def draft(self, sampler: DraftSampler, slots: Rows, lengths: I32, counts: I32) -> None:
        """Samples up to `counts` drafts for each of `slots`, whose sequences have `lengths` tokens, into `sampler`;
        writes KV for the drafts, which later steps overwrite."""
        drafter, heads, rows = self._drafter, self._drafter.heads, self._upload(slots)
        features = self._features[0, rows]
        tokens = [sampler.draw(drafter.logits(features))]
        computed = features.view(len(slots), 1, -1)[:, :0]  # features of draft positions, of the previous head
        for depth in range(1, min(len(heads), int(counts.max()))):
            known_and_drafted = torch.cat((self._features[depth - 1, rows].unsqueeze(1), computed), dim=1)
            draft_ids = torch.stack(tokens, dim=1).flatten()
            batch = self._passes.known(slots, lengths - 1 - depth, np.full_like(counts, depth), draft_ids)
            every = replace(batch, logit_tokens=None)
            computed = heads[depth](drafter.model, known_and_drafted.flatten(0, 1), every, self.caches[depth])
            computed = computed.view(len(slots), depth, -1)
            features = computed[:, -1].contiguous()
            tokens.append(sampler.draw(drafter.logits(features, depth)))
        last, token_ids = len(heads) - 1, tokens[-1]
        for batch in self._passes.drafts(slots, lengths - 1, np.maximum(counts - len(heads), 0)):
            given_tokens = replace(batch, token_ids=token_ids)
            features = heads[last](drafter.model, features, given_tokens, self.caches[last])
            token_ids = sampler.draw(drafter.logits(features, last))

    def _upload(self, array: object) -> Tensor:
        return upload(np.asarray(array), self._device)
