"""Which drafts turn out right, on the device, without looking at anything on the host."""

from __future__ import annotations

from services.worker.sampling.component import Tensor, upload
from services.worker.spec_decode.drafts import REFUSED, DraftRows


def accept(chosen: Tensor, rows: DraftRows, last_tokens: Tensor, scratch_slot: int) -> Tensor:
    """int32 [num_rows]: `chosen` as far as each slot's drafts agree with it and one token more, REFUSED behind that.

    Keeps each slot's last token in `last_tokens`.
    """
    device = chosen.device
    following = upload(rows.following, device)
    differs = (chosen != following).int()
    before = differs.cumsum(0) - differs
    earlier = before - before.index_select(0, upload(rows.first_of_row, device))
    kept = earlier == 0
    slots = upload(rows.slots.repeat(rows.counts + 1), device)
    last_tokens.index_copy_(0, slots.where(kept & (differs > 0), scratch_slot), chosen)
    return chosen.masked_fill(~kept, REFUSED)
