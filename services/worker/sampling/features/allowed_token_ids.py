"""allowed_token_ids: restricts a sequence to a list of token ids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.sampling.features.component import Positions, check_token_ids
from quire.services.worker.sampling.features.slot_entries import JoinedEntries, SlotEntries
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows


class AllowedTokenIds:
    """Sampling feature with the allowed ids of each restricted slot; a slot without a list is unrestricted."""

    parameters = frozenset({"allowed_token_ids"})

    def __init__(self, shard: VocabShard, device: torch.device) -> None:
        self._vocab_size = shard.vocab_size
        self._entries = SlotEntries(shard, device)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the distinct allowed ids that lie in this rank's shard; does nothing for an empty list. Raises
        InvalidArgument for an id outside of the vocabulary."""
        if not admission.sampling.allowed_token_ids:
            return
        ids = np.unique(np.array(admission.sampling.allowed_token_ids, dtype=np.int32))
        check_token_ids(ids, self._vocab_size, "allowed_token_ids")
        self._entries.put(slot, ids, np.zeros(len(ids), dtype=np.float32))

    def release(self, slot: int) -> None:
        self._entries.release(slot)

    def bind(self, slots: Rows) -> BoundAllowedTokenIds | None:
        """Joins the lists of the restricted rows on the device; None if no row is restricted."""
        joined = self._entries.join(slots)
        return None if joined is None else BoundAllowedTokenIds(joined)


class BoundAllowedTokenIds:
    """Bans every token of the rows that is not allowed."""

    def __init__(self, joined: JoinedEntries) -> None:
        self._joined = joined

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Sets all logits of the restricted rows to -inf, in place, except those of the allowed ids; a row whose ids
        all lie on other ranks loses all of its logits here."""
        allowed = (self._joined.rows, self._joined.places)
        kept = logits[allowed]
        logits.index_fill_(0, self._joined.active_rows, float("-inf"))
        logits[allowed] = kept

    def sampled(self, token_ids: Tensor) -> None:
        """Does nothing: the restriction does not depend on earlier tokens."""
