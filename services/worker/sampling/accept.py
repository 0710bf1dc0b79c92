"""Verifies draft tokens on the device, without synchronizing with the host."""

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
    """Samples every row independently of its drafts, int32 [num_rows]. accept_drafts() later accepts a draft if the
    token sampled in its row equals it, so that the text is the same as without drafts."""
    return ready.choose()


def choose_by_rejection(ready: ProcessedRows, rows: DraftRows) -> Tensor:
    """Applies the rejection rule (rejection.py) to the rows that have a draft: returns the draft if it is accepted,
    else a resampled token, int32 [num_rows]. Greedy rows, rows without a draft and rows without any finite logit get
    the independently sampled token; -1 where none could be."""
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
    """Accepts each slot's drafts up to the first mismatch and stores the slot's last token in `last_tokens`.

    Returns int32 [num_rows]: `chosen` for the accepted drafts and one token more, REJECTED in the rows after that.
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
    """Accepts token trees as accept_drafts() accepts chains: keeps the one path on which every draft equals the token
    chosen in its parent row, whose rows need not be adjacent, and stores the path's last token in `last_tokens`."""
    device = chosen.device
    token_ids, parents, paths = (upload(array, device) for array in (tree.token_ids, tree.parents, tree.paths))
    right = (chosen.index_select(0, parents) == token_ids) | (token_ids == NO_TOKEN)
    kept = right[paths].all(dim=1)
    follows = (kept & (token_ids != NO_TOKEN)).int()
    is_last = kept & (torch.zeros_like(follows).index_add_(0, parents, follows) == 0)
    slots = upload(rows.slots.repeat(rows.counts + 1), device)
    last_tokens.index_copy_(0, slots.where(is_last, scratch_slot), chosen)
    return chosen.masked_fill(~kept, REJECTED)
