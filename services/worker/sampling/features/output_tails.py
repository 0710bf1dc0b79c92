"""Keeps the last tokens of each slot's output on the device, for features that match token sequences."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions, rows_by_slot
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

NONE = -2  # a place before the output began


class OutputTails:
    """Owns the last tokens of each slot on the device, int32 [num_slots, width], right-aligned, NONE before the first
    one; `width` grows to what the longest request so far needs and never shrinks."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self.tokens: Tensor = torch.full((num_slots, 0), NONE, dtype=torch.int32, device=device)

    @property
    def width(self) -> int:
        return int(self.tokens.size(1))

    def start_slot(self, slot: int, output: I32, width: int) -> None:
        """Stores the end of the output so far of `slot`, of which the last `width` tokens will be read; widens the
        buffer if needed."""
        self._widen(width)
        tail = np.full(self.width, NONE, dtype=np.int32)
        kept = output[max(0, len(output) - self.width) :]
        tail[self.width - len(kept) :] = kept
        self.tokens[slot] = upload(tail, self._device)

    def _widen(self, width: int) -> None:
        """Adds columns on the left. Their content is unknown, and no admitted slot reads it."""
        lacking = width - self.width
        if lacking > 0:
            unknown = self.tokens.new_full((self.tokens.size(0), lacking), NONE)
            self.tokens = torch.cat((unknown, self.tokens), dim=1)


class BoundTails:
    """Tails of the rows of a step that a feature applies to."""

    def __init__(self, owner: OutputTails, rows: Rows, slots: Rows, device: torch.device) -> None:
        """`rows`: ascending; `slots`: the slot of each row."""
        self._owner = owner
        own_slots, own_rows = rows_by_slot(rows, slots)
        self._rows, self._slots, self._own_slots, self._own_rows = (
            upload(values, device) for values in (rows, slots, own_slots, own_rows)
        )

    def read(self, positions: Positions) -> Tensor:
        """Returns the tail of each row including its preceding drafts, int32 [num_rows, width]."""
        tails = self._owner.tokens[self._slots]
        return tails if positions.drafts is None else shifted(tails, positions.drafts[self._rows])

    def sampled(self, token_ids: Tensor) -> None:
        """Appends the rows' new tokens, int32 [num_rows] of the whole step with -1 for none, to the tails of their
        slots."""
        if not self._owner.width:
            return
        new = token_ids[self._own_rows].to(torch.int32).masked_fill(self._own_rows < 0, -1)
        new = new.gather(1, (new < 0).byte().argsort(dim=1, stable=True))  # in a tree, refused drafts lie between
        self._owner.tokens[self._own_slots] = shifted(self._owner.tokens[self._own_slots], new)


def shifted(tails: Tensor, new: Tensor) -> Tensor:
    """Returns `tails` [n, width] with the tokens of `new` [n, max_new], up to the first -1 of each row, appended."""
    known = torch.cat((tails, new), dim=1)
    count = (new >= 0).sum(dim=1, keepdim=True)
    return known.gather(1, count + torch.arange(tails.size(1), device=tails.device))
