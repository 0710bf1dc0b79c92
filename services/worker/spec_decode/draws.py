"""How drafts are drawn from a drafter's logits.

With the noise that the model will draw with at the same position: what both find likely, both say. For the rejection
rule with noise of its own, and with a record of what the draft was drawn from.
"""

from __future__ import annotations

import numpy as np
import torch

from services.worker.sampling.component import Positions, Tensor, upload
from services.worker.sampling.core import BoundCore
from services.worker.sampling.sampler import Sampler
from services.worker.slots import Rows
from services.worker.spec_decode.config import SpeculativeConfig
from services.worker.spec_decode.drafts import Drafts
from services.worker.spec_decode.rejection import DRAFT
from shared.columns import I32


class Draws:
    """Collects the drafts of a step, one of each slot at a time."""

    def __init__(self, sampler: Sampler, config: SpeculativeConfig, slots: Rows, counts: I32) -> None:
        """`slots` get `counts` drafts each, at least 1."""
        self._sampler = sampler
        self._greedy = config.draft_sample_method == "greedy"
        self._ruled = config.rejection_sample_method == "standard" and not self._greedy
        self._slots, self._counts = slots, counts
        self._rows = np.arange(len(slots))
        self._core: BoundCore = sampler.bind_core(slots)
        self._tokens = np.zeros((len(slots), int(counts.max())), dtype=np.int32)
        self._proposed: list[tuple[Rows, Tensor]] = []  # of each round

    @property
    def rows(self) -> Rows:
        """Indices of the slots that still draft."""
        return self._rows

    def draw(self, logits: Tensor, positions: I32, turn: int) -> Tensor:
        """int32 [num_rows]: the draft number `turn` (from 0) of each of `rows`, which will stand at `positions`."""
        token_ids = self._choose(logits, positions).clamp(min=0)
        self._tokens[self._rows, turn] = token_ids.cpu().numpy()
        return token_ids

    def go_on(self, turn: int) -> Tensor | None:
        """Leaves out who has all its drafts. Which of the rows before go on, None: all of them."""
        going = self._counts[self._rows] > turn
        if going.all():
            return None
        kept = np.flatnonzero(going)
        self._rows = self._rows[kept]
        if len(self._rows):
            self._core = self._sampler.bind_core(self._slots[self._rows])
        return upload(kept, self._sampler.device)

    def drafts(self) -> Drafts:
        wanted = np.arange(self._tokens.shape[1]) < self._counts[:, None]
        return Drafts(self._slots, self._counts, self._tokens[wanted], self._collected())

    def _choose(self, logits: Tensor, positions: I32) -> Tensor:
        if self._greedy or self._core.temperature is None:
            return logits.argmax(dim=1).int()
        placed = Positions(positions, upload(positions, logits.device))
        if not self._ruled:
            return self._core.choose(logits.float(), placed)
        self._proposed.append((self._rows, self._core.filtered(logits.float(), slice(None))))
        return self._core.choose(logits.float(), placed, stream=DRAFT)

    def _collected(self) -> Tensor | None:
        """Slot after slot, as the drafts are."""
        if not self._proposed:
            return None
        turns = np.concatenate([np.full(len(rows), turn) for turn, (rows, _) in enumerate(self._proposed)])
        slots = np.concatenate([rows for rows, _ in self._proposed])
        order = np.lexsort((turns, slots))
        return torch.cat([logits for _, logits in self._proposed])[upload(order, self._sampler.device)]
