"""Token ids with a value each, stored by slot and joined into one list for the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class JoinedEntries:
    """Entries of several rows of a step, on the device, and as far as features compare them there, on the host."""

    rows: Tensor  # int64 [num_entries]
    places: Tensor  # int64 [num_entries] column in the logits
    values: Tensor  # [num_entries]
    active_rows: Tensor  # int64 [num_active] rows of slots that have entries, in this shard or another
    host_rows: Rows  # `rows` on the host
    host_values: Values  # `values` on the host


class SlotEntries:
    """Stores by slot the (token id, value) entries that lie in this rank's shard."""

    def __init__(self, shard: VocabShard, device: torch.device) -> None:
        self._shard, self._device = shard, device
        self._entries: dict[int, tuple[I32, Values]] = {}

    def put(self, slot: int, token_ids: I32, values: Values) -> None:
        """Stores the entries of `slot`, replacing earlier ones; ids of other shards are dropped, and a slot without any
        left still counts as active."""
        is_local = self._shard.has(token_ids)
        self._entries[slot] = (token_ids[is_local] - self._shard.first, values[is_local])

    def release(self, slot: int) -> None:
        self._entries.pop(slot, None)

    def join(self, slots: Rows) -> JoinedEntries | None:
        """Joins the entries of `slots` [num_rows] into one list and uploads it; None if no slot has entries."""
        if not self._entries:
            return None
        active = [row for row, slot in enumerate(slots.tolist()) if slot in self._entries]
        if not active:
            return None
        entries = [self._entries[int(slots[row])] for row in active]
        rows = np.repeat(active, [len(ids) for ids, _ in entries])
        values = np.concatenate([values for _, values in entries])
        return JoinedEntries(
            rows=upload(rows, self._device),
            places=upload(np.concatenate([ids for ids, _ in entries]), self._device, np.int64),
            values=upload(values, self._device),
            active_rows=upload(active, self._device),
            host_rows=rows,
            host_values=values,
        )
