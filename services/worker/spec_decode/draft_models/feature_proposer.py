"""Drafts with layers that continue the model's own features: an EAGLE head, or multi-token prediction modules.

A feature of position i is the input of the model's output head. The first layer combines it with the token of position
i + 1 into a feature that predicts the token of position i + 2; module_chain.py runs further layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.spec_decode.draft_models.draft_passes import DraftPasses, FilledBlocks, spread
from quire.services.worker.spec_decode.draft_models.draft_sampler import DraftSampler
from quire.services.worker.spec_decode.draft_models.module_chain import FeatureDrafter, ModuleChain
from quire.services.worker.spec_decode.drafter import DrafterWorker
from quire.services.worker.spec_decode.proposer import DraftRequest
from quire.services.worker.spec_decode.trees.token_tree import TokenTree
from quire.services.worker.spec_decode.trees.tree_sampler import TreeSampler
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.slots import NewBlocks, Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32

MIN_SEEN_SHARE = 0.5  # share of a sequence's positions below which a layer's drafts are not worth verifying


class FeatureProposer:
    """Proposer that runs its layers once over the features of every step. It never sees the positions of steps that
    produced no features: outputs of steps without drafts, and prompts and prefixes computed in large steps then."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        worker: DrafterWorker,
        *,
        size: int = 0,
        project: Callable[[Tensor], Tensor] = lambda features: features,
    ) -> None:
        """`size`: hidden size of the layer; 0: the model's. `project`: maps the model's output to the layer's
        features."""
        self._worker, self._drafter, self._project = worker, drafter, project
        limits, device = worker.limits, drafter.place.device
        self._passes = DraftPasses(worker.table, device)
        self._chain = ModuleChain(drafter, self._passes, limits, size or drafter.model.config.hidden_size)
        self._blocks = FilledBlocks(worker.table, limits.num_blocks)
        self._num_seen = np.zeros(limits.max_num_seqs, dtype=np.int32)  # positions processed, without skipped ones

    def add_blocks(self, new: NewBlocks) -> None:
        self._blocks.add_blocks(new)

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies the layers' KV of copied blocks, and how far these are filled."""
        self._chain.copy_blocks(copies)
        self._blocks.copy(copies)

    def start_sequence(self, slot: int) -> None:
        """Starts a sequence with the cached blocks that hold this drafter's KV counted as seen; it cannot draft before
        a step has delivered features."""
        self._num_seen[slot] = self._blocks.start_sequence(slot)
        self._chain.start_sequence(slot)

    def end_sequence(self, slot: int) -> None:
        """Does nothing: the next sequence of the slot overwrites its state."""

    def clear_history(self) -> None:
        """Does nothing: no state outlives its sequence."""

    def record_step(self, inputs: StepInputs, output: RunnerOutput) -> None:
        """Runs the layers on the step's features, each paired with the token that follows it, as far as that token is
        final: features of refused drafts are left out. Does nothing if the step kept no features."""
        history = self._worker.history
        if output.features is None:
            return
        firsts, counts = inputs.query_start[:-1], np.diff(inputs.query_start)
        starts = inputs.positions[firsts]
        counts = np.minimum(counts, history.lengths[inputs.slots] - 1 - starts)
        kept = np.flatnonzero(counts > 0)
        if not len(kept):
            return
        slots, starts, counts = inputs.slots[kept], starts[kept], counts[kept].astype(np.int32)
        features = output.features
        if len(kept) != inputs.num_rows or int(counts.sum()) != inputs.num_tokens:
            tokens = output.in_place(spread(firsts[kept], counts)[1], inputs.sampling_tokens)
            features = features.index_select(0, self._upload(tokens))
        rows, positions = spread(starts, counts)
        token_ids = history.tokens[slots[rows], positions + 1]
        self._chain.process_features(slots, starts, counts, token_ids, self._project(features))
        self._record_seen(slots, starts, counts)

    def propose(self, request: DraftRequest) -> Drafts | None:
        """Drafts for the slots whose last position was processed and of whose positions at least MIN_SEEN_SHARE were;
        returns None if there is none."""
        lengths = request.history.lengths[request.slots]
        can = self._chain.can_draft(request.slots, lengths) & (
            self._num_seen[request.slots] >= MIN_SEEN_SHARE * lengths
        )
        if not can.any():
            return None
        slots, lengths, counts = request.slots[can], lengths[can], request.counts[can]
        if self._worker.config.tree is not None:
            return self._propose_trees(self._worker.config.tree, slots, lengths, counts)
        sampler = DraftSampler(self._worker.sampler, self._worker.config, slots, lengths, counts)
        self._chain.draft(sampler, slots, lengths, counts)
        return sampler.drafts()

    def _propose_trees(self, tree: TokenTree, slots: Rows, lengths: I32, counts: I32) -> Drafts | None:
        """Drafts trees level by level. The layer stores KV of each inner node where the model stores that of drafts: a
        slot whose count does not cover all inner nodes gets no drafts in this step."""
        tree = tree.truncate(int(counts.max()))
        fits = counts >= tree.num_inner
        if not fits.any():
            return None
        slots, lengths, counts = slots[fits], lengths[fits], counts[fits]
        sampler = TreeSampler(self._worker.sampler, self._worker.config, tree, slots, lengths)
        drafter, features = self._drafter, self._chain.features(slots)
        (head,), (cache,) = drafter.heads, self._chain.caches
        tokens = sampler.draw(tree.levels[0], drafter.logits(features))
        for (above, level), batch in zip(
            pairwise(tree.levels), self._passes.trees(tree, slots, lengths - 1), strict=True
        ):
            features = features.view(len(slots), -1, features.size(1))[:, self._upload(above.parents[above.inner])]
            inputs = replace(batch, token_ids=self._upload(tokens[:, above.inner].ravel()))
            features = head(drafter.model, features.flatten(0, 1), inputs, cache)
            tokens = sampler.draw(level, drafter.logits(features))
        return sampler.drafts(counts)

    def _record_seen(self, slots: Rows, starts: I32, counts: I32) -> None:
        """Records processed positions: they extend the filled ones, or leave a hole, after which blocks cannot be
        shared."""
        contiguous = self._num_seen[slots] >= starts
        self._num_seen[slots] = np.where(contiguous, starts + counts, self._num_seen[slots] + counts)
        self._blocks.mark(slots[contiguous], self._num_seen[slots[contiguous]])

    def _upload(self, array: object) -> Tensor:
        return upload(np.asarray(array), self._drafter.place.device)
