"""repetition_penalty, presence_penalty and frequency_penalty: make tokens that occurred before less likely."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared import columns
from quire.shared.columns import I32


@dataclass(frozen=True, slots=True)
class PenaltyParams:
    """Penalties of one slot, and the index of its row in the pool of counts."""

    pool_row: int
    repetition: float
    presence: float
    frequency: float


class Penalties:
    """Sampling feature that owns a pool of token counts over this rank's shard, int32 [pool_rows, shard.size], with a
    row per penalised slot. The pool doubles when it is full and never shrinks."""

    parameters = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty"})

    def __init__(self, shard: VocabShard, device: torch.device) -> None:
        self.shard = shard
        self._device = device
        self._slots: dict[int, PenaltyParams] = {}
        self._free: list[int] = []
        self.output_counts: Tensor = torch.zeros((0, shard.size), dtype=torch.int32, device=device)
        self.in_prompt: Tensor = torch.zeros((0, shard.size), dtype=torch.bool, device=device)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Allocates a pool row for a slot with penalties and counts the tokens of its prompt (for the repetition
        penalty only) and of its output so far; does nothing if all penalties are neutral."""
        sampling = admission.sampling
        repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
        if repetition == 1 and not sampling.presence_penalty and not sampling.frequency_penalty:
            return
        pool_row = self._allocate_row()
        tokens = columns.i32(admission.token_ids)
        prompt, output = tokens[: admission.num_prompt_tokens], tokens[admission.num_prompt_tokens :]
        self.in_prompt[pool_row] = self._count(prompt) > 0
        self.output_counts[pool_row] = self._count(output)
        self._slots[slot] = PenaltyParams(pool_row, repetition, sampling.presence_penalty, sampling.frequency_penalty)

    def release(self, slot: int) -> None:
        """Returns the slot's pool row, if it has one, to the free rows."""
        strength = self._slots.pop(slot, None)
        if strength is not None:
            self._free.append(strength.pool_row)

    def bind(self, slots: Rows) -> BoundPenalties | None:
        """Prepares the rows of penalised slots; None if there are none."""
        if not self._slots:
            return None
        active = {row: self._slots[slot] for row, slot in enumerate(slots.tolist()) if slot in self._slots}
        return BoundPenalties(self, active, self._device) if active else None

    def _count(self, tokens: I32) -> Tensor:
        """Returns how often each token of the shard occurs, int32 [shard.size]."""
        local_ids = tokens[self.shard.has(tokens)] - self.shard.first
        counts = np.bincount(local_ids, minlength=self.shard.size).astype(np.int32)
        return upload(counts, self._device)

    def _allocate_row(self) -> int:
        """Returns a free pool row; doubles the pool if none is free, which copies it."""
        if not self._free:
            size = self.output_counts.size(0)
            added = max(1, size)
            self._free = list(range(size, size + added))
            self.output_counts = torch.cat((self.output_counts, self.output_counts.new_zeros(added, self.shard.size)))
            self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros(added, self.shard.size)))
        return self._free.pop()


class BoundPenalties:
    """Penalties of the rows that have some, as columns on the device; a penalty that no row uses costs nothing."""

    def __init__(self, owner: Penalties, active: dict[int, PenaltyParams], device: torch.device) -> None:
        self._owner = owner
        strengths = list(active.values())
        self._rows = upload(list(active), device)
        self._pool_rows = upload([s.pool_row for s in strengths], device)
        self._repetition = _column([s.repetition for s in strengths], 1.0, device)
        self._presence = _column([s.presence for s in strengths], 0.0, device)
        self._frequency = _column([s.frequency for s in strengths], 0.0, device)

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Penalises in place the tokens that occurred: repetition divides positive and multiplies negative logits of
        tokens in prompt, output or preceding drafts; frequency subtracts per occurrence and presence once, in output
        and drafts."""
        counts = self._owner.output_counts[self._pool_rows]  # [num_active, shard.size]
        if positions.drafts is not None:
            token_columns, is_local = self._owner.shard.local_columns(positions.drafts[self._rows])
            counts.scatter_add_(1, token_columns, is_local.int())
        occurred = counts > 0
        changed = logits[self._rows]
        if self._repetition is not None:
            repeated = torch.where(changed > 0, changed / self._repetition, changed * self._repetition)
            changed = torch.where(occurred | self._owner.in_prompt[self._pool_rows], repeated, changed)
        if self._frequency is not None:
            changed -= self._frequency * counts
        if self._presence is not None:
            changed -= self._presence * occurred
        logits[self._rows] = changed

    def sampled(self, token_ids: Tensor) -> None:
        """Counts the rows' new tokens that lie in this rank's shard."""
        new, is_local = self._owner.shard.local_columns(token_ids[self._rows])
        self._owner.output_counts.index_put_((self._pool_rows, new), is_local.int(), accumulate=True)


def _column(values: list[float], unused: float, device: torch.device) -> Tensor | None:
    """Returns `values` as float32 [num_active, 1], or None if no row uses them."""
    if all(value == unused for value in values):
        return None
    return upload(values, device, np.float32).unsqueeze(1)
