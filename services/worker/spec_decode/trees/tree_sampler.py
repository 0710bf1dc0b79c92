"""Samples the nodes of a draft tree from a drafter's logits, and selects the nodes that a step verifies."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.kernels.reference.sampling.noise import noise_of, row_keys
from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.choice import BoundChoice
from quire.services.worker.sampling.sampler import Sampler
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.trees.token_tree import TokenTree, TreeLevel, select_best_nodes
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.drafts.tree_rows import ROOT
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

NUM_CANDIDATES = 32  # likeliest tokens that noise is added to: up to a temperature of 1 hardly another token wins


class TreeSampler:
    """Samples the trees of some slots level by level.

    Guesses are the tokens that lead after adding the noise that the model will use at that position: the first one is
    what a chain would draft, the others are its runners-up. The leads also estimate the acceptance probabilities.
    """

    def __init__(self, sampler: Sampler, config: SpeculativeConfig, tree: TokenTree, slots: Rows, lengths: I32) -> None:
        """`slots`: slots whose sequences have `lengths` tokens."""
        self._sampler, self._tree, self._slots, self._lengths = sampler, tree, slots, lengths
        self._greedy = config.draft_sample_method == "greedy"
        self._choices: dict[int, BoundChoice] = {}  # by rows per slot
        shape = len(slots), tree.num_nodes
        self._tokens = np.zeros(shape, dtype=np.int32)
        self._scores: npt.NDArray[np.float32] = np.zeros(shape, dtype=np.float32)

    def draw(self, level: TreeLevel, logits: Tensor) -> I32:
        """Samples the tokens of a level's nodes: int32 [num_slots, num_nodes].

        `logits` [num_slots * num_parents, vocab_size]: of one parent, or of each inner node of the level above.
        """
        num_slots = len(self._slots)
        rows_per_slot = len(logits) // num_slots
        chances, best = self._best_tokens(logits.float(), level, rows_per_slot)
        parents = level.parents if rows_per_slot > 1 else np.zeros_like(level.parents)
        at = (slice(None), parents, level.ranks)
        tokens: I32 = best.view(num_slots, rows_per_slot, -1).cpu().numpy()[at].astype(np.int32)
        scores = chances.view(num_slots, rows_per_slot, -1).cpu().numpy()[at]
        if level.depth > 1:
            scores = scores + self._scores[:, self._tree.parents[level.span]]
        self._tokens[:, level.span], self._scores[:, level.span] = tokens, scores
        return tokens

    def drafts(self, counts: I32) -> Drafts | None:
        """Returns the most likely `counts` nodes of each slot as trees; slots where nothing could be sampled are left
        out, None if no slot remains."""
        selected = select_best_nodes(self._scores, counts)
        has_nodes = selected.any(axis=1)
        if not has_nodes.any():
            return None
        selected, tokens, parents = selected[has_nodes], self._tokens[has_nodes], self._tree.parents
        numbers = selected.cumsum(axis=1, dtype=np.int32) - 1
        above = np.where(parents == ROOT, ROOT, numbers[:, parents]).astype(np.int32)
        return Drafts(
            self._slots[has_nodes], selected.sum(axis=1, dtype=np.int32), tokens[selected], parents=above[selected]
        )

    def _best_tokens(self, logits: Tensor, level: TreeLevel, rows_per_slot: int) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and tokens of the guesses for each row, [num_rows, width] each."""
        choice = self._choice(rows_per_slot)
        if self._greedy or choice.temperature is None:
            chances, tokens = logits.log_softmax(1).topk(level.width, dim=1)
            return chances, tokens
        values, tokens = choice.filtered(logits, slice(None)).topk(
            max(level.width, min(NUM_CANDIDATES, logits.size(1))), dim=1
        )
        key0, key1 = (key[level.depth - 1].repeat_interleave(rows_per_slot) for key in self._keys)
        noise = noise_of(key0, key1, tokens).masked_fill_((choice.temperature == 0).unsqueeze(1), 0)
        chances, order = (values + noise).log_softmax(1).topk(level.width, dim=1)
        return chances, tokens.gather(1, order)

    @cached_property
    def _keys(self) -> tuple[Tensor, Tensor]:
        """Noise keys of each level and slot, [num_levels, num_slots]."""
        shape, seeds = (len(self._tree.levels), len(self._slots)), self._choice(1).seeds
        places = upload(self._lengths + np.arange(shape[0], dtype=np.int32)[:, None], seeds.device)
        key0, key1 = row_keys(seeds.repeat(shape[0]), places.flatten())
        return key0.view(shape), key1.view(shape)

    def _choice(self, rows_per_slot: int) -> BoundChoice:
        """Returns temperature, filters and seeds of the slots with `rows_per_slot` adjacent rows each, cached."""
        if rows_per_slot not in self._choices:
            self._choices[rows_per_slot] = self._sampler.bind_choice(np.repeat(self._slots, rows_per_slot))
        return self._choices[rows_per_slot]
