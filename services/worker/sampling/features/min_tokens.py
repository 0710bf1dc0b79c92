"""min_tokens: bans end-of-sequence and stop tokens until the output has a minimum length."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.features.slot_entries import JoinedEntries, SlotEntries
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared import columns


class MinTokens:
    """Sampling feature that holds the banned end and stop ids of each slot with a minimum, each with the first position
    in the sequence at which it is allowed."""

    parameters = frozenset({"min_tokens"})

    def __init__(self, shard: VocabShard, device: torch.device) -> None:
        self._vocab_size = shard.vocab_size
        self._entries = SlotEntries(shard, device)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Bans the end-of-sequence and stop ids before position num_prompt_tokens + min_tokens; does nothing without a
        minimum. Ids outside of the vocabulary are ignored: they cannot be sampled."""
        if not admission.sampling.min_tokens:
            return
        eos = columns.u32(admission.eos_token_ids)
        stops = np.array(admission.sampling.stop_token_ids, dtype=np.uint32)
        end_ids = np.unique(np.concatenate((eos, stops)))
        banned = end_ids[end_ids < self._vocab_size].astype(np.int32)  # others cannot be sampled anyway
        free_from = admission.num_prompt_tokens + admission.sampling.min_tokens
        if len(banned):
            self._entries.put(slot, banned, np.full(len(banned), free_from, dtype=np.int32))

    def release(self, slot: int) -> None:
        self._entries.release(slot)

    def bind(self, slots: Rows) -> BoundMinTokens | None:
        """Joins the banned ids of the rows on the device; None if no slot has a minimum."""
        joined = self._entries.join(slots)
        return None if joined is None else BoundMinTokens(joined)


class BoundMinTokens:
    """Banned ids of the rows of a step, with the positions from which they are allowed."""

    def __init__(self, joined: JoinedEntries) -> None:
        self._joined = joined

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Sets the logits of ids that are not allowed yet to -inf, in place; launches nothing once the host knows that
        all rows are past their minimum."""
        joined = self._joined
        if (positions.host[joined.host_rows] >= joined.host_values).all():
            return
        early = positions.device[joined.rows] < joined.values
        bans = torch.zeros(early.shape, device=early.device).masked_fill_(early, float("-inf"))
        logits.index_put_((joined.rows, joined.places), bans, accumulate=True)

    def sampled(self, token_ids: Tensor) -> None:
        """Does nothing: the positions give the output's length."""
