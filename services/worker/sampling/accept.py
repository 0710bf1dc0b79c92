"""Which drafts turn out right, on the device, without looking at anything on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.rejection import accept_or_resample
from quire.services.worker.sampling.sampler import ProcessedRows
from quire.services.worker.step.drafts.drafts import REJECTED, DraftRows
from quire.services.worker.step.drafts.tree_rows import NO_TOKEN, TreeRows

ChooseTokens = Callable[[ProcessedRows, DraftRows], Tensor]


def choose_coupled(ready: ProcessedRows, rows: DraftRows) -> Tensor:
    """What each row says by itself, whatever the drafts are."""
    return ready.choose()


def choose_by_rejection(ready: ProcessedRows, rows: DraftRows) -> Tensor:
    """The draft that the row is to confirm, if the rejection rule keeps it; by themselves choose greedy rows and those
    without one."""
    if ready.choice.temperature is None:
        return ready.choose()
    target = ready.choice.filtered(ready.logits, slice(None))  # before a choice, which may overwrite the logits
    chosen = ready.choose()
    following = upload(rows.expected_ids, chosen.device).long()
    drafts = following.clamp(min=0)
    proposed = None
    if rows.proposed is not None:
        proposed = target.clone()
        proposed[following >= 0] = ready.vocabulary.local_logits(rows.proposed)
    ruled = accept_or_resample(
        target,
        proposed,
        drafts,
        seeds=ready.choice.seeds,
        positions=ready.positions.device,
        vocabulary=ready.vocabulary,
    )
    by_rule = (following >= 0) & (ready.choice.temperature > 0) & (chosen >= 0)
    return torch.where(by_rule, ruled.int(), chosen)


REJECTION_METHODS: dict[str, ChooseTokens] = {"coupled": choose_coupled, "standard": choose_by_rejection}


def accept_drafts(chosen: Tensor, rows: DraftRows, last_tokens: Tensor, scratch_slot: int) -> Tensor:
    """int32 [num_rows]: `chosen` as far as each slot's drafts agree with it and one token more, REJECTED behind that.

    Keeps each slot's last token in `last_tokens`.
    """
    if rows.tree is not None:
        return _accept_path(chosen, rows, rows.tree, last_tokens, scratch_slot)
    device = chosen.device
    following = upload(rows.expected_ids, device)
    differs = (chosen != following).int()
    before = differs.cumsum(0) - differs
    earlier = before - before.index_select(0, upload(rows.first_of_row, device))
    kept = earlier == 0
    slots = upload(rows.slots.repeat(rows.counts + 1), device)
    last_tokens.index_copy_(0, slots.where(kept & (differs > 0), scratch_slot), chosen)
    return chosen.masked_fill(~kept, REJECTED)


def _accept_path(chosen: Tensor, rows: DraftRows, tree: TreeRows, last_tokens: Tensor, scratch_slot: int) -> Tensor:
    """The same where drafts are trees: of each, the one path on which every draft is what the row before it says. Its
    rows need not follow each other."""
    device = chosen.device
    token_ids, parents, paths = (upload(array, device) for array in (tree.token_ids, tree.parents, tree.paths))
    right = (chosen.index_select(0, parents) == token_ids) | (token_ids == NO_TOKEN)
    kept = right[paths].all(dim=1)
    follows = (kept & (token_ids != NO_TOKEN)).int()
    is_last = kept & (torch.zeros_like(follows).index_add_(0, parents, follows) == 0)
    slots = upload(rows.slots.repeat(rows.counts + 1), device)
    last_tokens.index_copy_(0, slots.where(is_last, scratch_slot), chosen)
    return chosen.masked_fill(~kept, REJECTED)
