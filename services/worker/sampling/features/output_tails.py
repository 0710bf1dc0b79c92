"""The last tokens of the output of each slot, on the device, for features that look back a little."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions, rows_by_slot
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

NONE = -2  # before the output began


class OutputTails:
    """As many tokens as the most demanding admission asked for."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self.tokens: Tensor = torch.full((num_slots, 0), NONE, dtype=torch.int32, device=device)

    @property
    def width(self) -> int:
        return int(self.tokens.size(1))

    def start_slot(self, slot: int, output: I32, width: int) -> None:
        """`slot` has this output so far, whose last `width` tokens will be read."""
        self._widen(width)
        tail = np.full(self.width, NONE, dtype=np.int32)
        kept = output[max(0, len(output) - self.width) :]
        tail[self.width - len(kept) :] = kept
        self.tokens[slot] = upload(tail, self._device)

    def _widen(self, width: int) -> None:
        """What is further back than it was is not known, and no admitted slot asks for it."""
        lacking = width - self.width
        if lacking > 0:
            before = self.tokens.new_full((self.tokens.size(0), lacking), NONE)
            self.tokens = torch.cat((before, self.tokens), dim=1)


class BoundTails:
    """The tails of the rows of a step that a feature is about."""

    def __init__(self, owner: OutputTails, rows: Rows, slots: Rows, device: torch.device) -> None:
        """`rows`, ascending, with the slot of each."""
        self._owner = owner
        own_slots, own_rows = rows_by_slot(rows, slots)
        self._rows, self._slots, self._own_slots, self._own_rows = (
            upload(values, device) for values in (rows, slots, own_slots, own_rows)
        )

    def read(self, positions: Positions) -> Tensor:
        """int32 [num_rows, width], drafts included."""
        tails = self._owner.tokens[self._slots]
        return tails if positions.drafts is None else shifted(tails, positions.drafts[self._rows])

    def sampled(self, token_ids: Tensor) -> None:
        if not self._owner.width:
            return
        new = token_ids[self._own_rows].to(torch.int32).masked_fill(self._own_rows < 0, -1)
        new = new.gather(1, (new < 0).byte().argsort(dim=1, stable=True))  # in a tree, refused drafts stand between
        self._owner.tokens[self._own_slots] = shifted(self._owner.tokens[self._own_slots], new)


def shifted(tails: Tensor, new: Tensor) -> Tensor:
    """`tails` [n, width] once the tokens of `new` [n, most], up to the first -1 of each row, have followed them."""
    known = torch.cat((tails, new), dim=1)
    count = (new >= 0).sum(dim=1, keepdim=True)
    return known.gather(1, count + torch.arange(tails.size(1), device=tails.device))
