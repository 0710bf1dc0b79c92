"""logit_bias: adds a value to the logits of single tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.sampling.features.component import Positions, check_token_ids
from quire.services.worker.sampling.features.slot_entries import JoinedEntries, SlotEntries
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows


class LogitBias:
    """Sampling feature that holds token ids and their biases for each slot that has some."""

    parameters = frozenset({"logit_bias"})

    def __init__(self, shard: VocabShard, device: torch.device) -> None:
        self._vocab_size = shard.vocab_size
        self._entries = SlotEntries(shard, device)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the biases of the ids in this rank's shard; does nothing without any. Raises InvalidArgument for an id
        outside of the vocabulary."""
        bias = admission.sampling.logit_bias
        if not bias:
            return
        ids = np.array(list(bias), dtype=np.int32)
        check_token_ids(ids, self._vocab_size, "logit_bias")
        self._entries.put(slot, ids, np.array(list(bias.values()), dtype=np.float32))

    def release(self, slot: int) -> None:
        self._entries.release(slot)

    def bind(self, slots: Rows) -> BoundLogitBias | None:
        """Joins the biases of the rows on the device; None if no row has any."""
        joined = self._entries.join(slots)
        return None if joined is None else BoundLogitBias(joined)


class BoundLogitBias:
    """Biases of the rows of a step, joined into one list."""

    def __init__(self, joined: JoinedEntries) -> None:
        self._joined = joined

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Adds each bias to its logit, in place."""
        logits.index_put_((self._joined.rows, self._joined.places), self._joined.values, accumulate=True)

    def sampled(self, token_ids: Tensor) -> None:
        """Does nothing: biases do not depend on earlier tokens."""
