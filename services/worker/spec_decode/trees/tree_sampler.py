"""How the nodes of a tree of drafts are drawn from a drafter's logits, and what becomes a step's drafts."""

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

NUM_CANDIDATES = 32  # likeliest tokens that noise is added to: at a temperature of 1 or less hardly another one leads


class TreeSampler:
    """The trees of some slots, drawn level by level.

    Guesses are the tokens that lead once the noise is added that the model will draw with at that position: the first
    is what a chain would have, the others come next. By how much each leads is also how its chance is told.
    """

    def __init__(self, sampler: Sampler, config: SpeculativeConfig, tree: TokenTree, slots: Rows, lengths: I32) -> None:
        """`slots`, whose sequences have `lengths` tokens."""
        self._sampler, self._tree, self._slots, self._lengths = sampler, tree, slots, lengths
        self._greedy = config.draft_sample_method == "greedy"
        self._choices: dict[int, BoundChoice] = {}  # by rows of each slot
        shape = len(slots), tree.num_nodes
        self._tokens = np.zeros(shape, dtype=np.int32)
        self._scores: npt.NDArray[np.float32] = np.zeros(shape, dtype=np.float32)

    def draw(self, level: TreeLevel, logits: Tensor) -> I32:
        """`logits` [num_slots * num_parents, vocab_size], of one parent or of each inner node of the level above: the
        tokens of the level's nodes, [num_slots, num_nodes]."""
        num_slots = len(self._slots)
        several = len(logits) // num_slots
        chances, led = self._best_tokens(logits.float(), level, several)
        parents = level.parents if several > 1 else np.zeros_like(level.parents)
        at = (slice(None), parents, level.ranks)
        tokens: I32 = led.view(num_slots, several, -1).cpu().numpy()[at].astype(np.int32)
        scores = chances.view(num_slots, several, -1).cpu().numpy()[at]
        if level.depth > 1:
            scores = scores + self._scores[:, self._tree.parents[level.span]]
        self._tokens[:, level.span], self._scores[:, level.span] = tokens, scores
        return tokens

    def drafts(self, counts: I32) -> Drafts | None:
        """The most likely `counts` nodes of each slot; None where nothing could be drawn."""
        taken = select_best_nodes(self._scores, counts)
        some = taken.any(axis=1)
        if not some.any():
            return None
        taken, tokens, parents = taken[some], self._tokens[some], self._tree.parents
        numbers = taken.cumsum(axis=1, dtype=np.int32) - 1
        above = np.where(parents == ROOT, ROOT, numbers[:, parents]).astype(np.int32)
        return Drafts(self._slots[some], taken.sum(axis=1, dtype=np.int32), tokens[taken], parents=above[taken])

    def _best_tokens(self, logits: Tensor, level: TreeLevel, several: int) -> tuple[Tensor, Tensor]:
        """Logarithms of chances and tokens, [num_rows, width] each, of the guesses behind each row."""
        choice = self._choice(several)
        if self._greedy or choice.temperature is None:
            chances, tokens = logits.log_softmax(1).topk(level.width, dim=1)
            return chances, tokens
        values, tokens = choice.filtered(logits, slice(None)).topk(
            max(level.width, min(NUM_CANDIDATES, logits.size(1))), dim=1
        )
        key0, key1 = (key[level.depth - 1].repeat_interleave(several) for key in self._keys)
        noise = noise_of(key0, key1, tokens).masked_fill_((choice.temperature == 0).unsqueeze(1), 0)
        chances, order = (values + noise).log_softmax(1).topk(level.width, dim=1)
        return chances, tokens.gather(1, order)

    @cached_property
    def _keys(self) -> tuple[Tensor, Tensor]:
        """Of the noise of each level and slot, [num_levels, num_slots]."""
        shape, seeds = (len(self._tree.levels), len(self._slots)), self._choice(1).seeds
        places = upload(self._lengths + np.arange(shape[0], dtype=np.int32)[:, None], seeds.device)
        key0, key1 = row_keys(seeds.repeat(shape[0]), places.flatten())
        return key0.view(shape), key1.view(shape)

    def _choice(self, several: int) -> BoundChoice:
        if several not in self._choices:
            self._choices[several] = self._sampler.bind_choice(np.repeat(self._slots, several))
        return self._choices[several]
