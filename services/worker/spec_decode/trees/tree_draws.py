"""How the nodes of a tree of drafts are drawn from a drafter's logits, and what becomes a step's drafts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.noise import gumbel_noise
from services.worker.device.staging import upload
from services.worker.sampling.sampler import Sampler
from services.worker.spec_decode.config import SpeculativeConfig
from services.worker.spec_decode.drafts import Drafts
from services.worker.spec_decode.trees.token_tree import Level, TokenTree, most_likely
from services.worker.spec_decode.trees.tree_rows import ROOT
from services.worker.step.slots import Rows
from shared.columns import I32


class TreeDraws:
    """The trees of some slots, drawn level by level.

    Guesses are the tokens that lead once the noise is added that the model will draw with at that position: the first
    is what a chain would have, the others come next. By how much each leads is also how its chance is told.
    """

    def __init__(self, sampler: Sampler, config: SpeculativeConfig, tree: TokenTree, slots: Rows, lengths: I32) -> None:
        """`slots`, whose sequences have `lengths` tokens."""
        self._sampler, self._tree, self._slots, self._lengths = sampler, tree, slots, lengths
        self._greedy = config.draft_sample_method == "greedy"
        shape = len(slots), tree.num_nodes
        self._tokens = np.zeros(shape, dtype=np.int32)
        self._scores: npt.NDArray[np.float32] = np.zeros(shape, dtype=np.float32)

    def draw(self, level: Level, logits: Tensor) -> I32:
        """`logits` [num_slots * num_parents, vocab_size], of one parent or of each inner node of the level above: the
        tokens of the level's nodes, [num_slots, num_nodes]."""
        num_slots = len(self._slots)
        several = len(logits) // num_slots
        found = self._led(logits, np.repeat(self._slots, several), np.repeat(self._lengths, several) + level.depth - 1)
        best = found.topk(min(level.width, found.size(1)), dim=1)
        chances = (best.values - found.logsumexp(dim=1, keepdim=True)).view(num_slots, several, -1)
        parents = level.parents if several > 1 else np.zeros_like(level.parents)
        at = (slice(None), parents, level.ranks)
        self._tokens[:, level.span] = best.indices.view(num_slots, several, -1).cpu().numpy()[at]
        scores = chances.cpu().numpy()[at]
        above = self._tree.parents[level.span]
        self._scores[:, level.span] = scores if level.depth == 1 else scores + self._scores[:, above]
        tokens: I32 = self._tokens[:, level.span]
        return tokens

    def drafts(self, counts: I32) -> Drafts | None:
        """The most likely `counts` nodes of each slot; None where nothing could be drawn."""
        taken = most_likely(self._scores, counts)
        some = taken.any(axis=1)
        if not some.any():
            return None
        taken, tokens, parents = taken[some], self._tokens[some], self._tree.parents
        numbers = taken.cumsum(axis=1, dtype=np.int32) - 1
        above = np.where(parents == ROOT, ROOT, numbers[:, parents]).astype(np.int32)
        return Drafts(self._slots[some], taken.sum(axis=1, dtype=np.int32), tokens[taken], parents=above[taken])

    def _led(self, logits: Tensor, slots: Rows, places: I32) -> Tensor:
        """[num_rows, vocab_size] what the greatest is chosen of, for tokens at `places`."""
        logits = logits.float()
        choice = self._sampler.bind_choice(slots)
        if self._greedy or choice.temperature is None:
            return logits
        noise = gumbel_noise(choice.seeds, upload(places, logits.device), logits.size(1))
        is_drawn = (choice.temperature > 0).unsqueeze(1)
        return torch.where(is_drawn, choice.filtered(logits, slice(None)) + noise, logits)
