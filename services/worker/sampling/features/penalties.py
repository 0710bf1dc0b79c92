"""repetition_penalty, presence_penalty and frequency_penalty: tokens that occurred become less likely."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.vocabulary.part import VocabPart
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared import columns
from quire.shared.columns import I32


@dataclass(frozen=True, slots=True)
class Strength:
    """One slot's penalties, and its place in the pool of counts."""

    place: int
    repetition: float
    presence: float
    frequency: float


class Penalties:
    """A pool of rows over the tokens that are here for the slots that are penalised; it grows with the most of them at
    a time."""

    def __init__(self, part: VocabPart, device: torch.device) -> None:
        self.part = part
        self._device = device
        self._slots: dict[int, Strength] = {}
        self._free: list[int] = []
        self.output_counts: Tensor = torch.zeros((0, part.size), dtype=torch.int32, device=device)
        self.in_prompt: Tensor = torch.zeros((0, part.size), dtype=torch.bool, device=device)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        sampling = admission.sampling
        repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
        if repetition == 1 and not sampling.presence_penalty and not sampling.frequency_penalty:
            return
        place = self._take()
        tokens = columns.i32(admission.token_ids)
        prompt, output = tokens[: admission.num_prompt_tokens], tokens[admission.num_prompt_tokens :]
        self.in_prompt[place] = self._count(prompt) > 0
        self.output_counts[place] = self._count(output)
        self._slots[slot] = Strength(place, repetition, sampling.presence_penalty, sampling.frequency_penalty)

    def release(self, slot: int) -> None:
        strength = self._slots.pop(slot, None)
        if strength is not None:
            self._free.append(strength.place)

    def bind(self, slots: Rows) -> BoundPenalties | None:
        if not self._slots:
            return None
        active = {row: self._slots[slot] for row, slot in enumerate(slots.tolist()) if slot in self._slots}
        return BoundPenalties(self, active, self._device) if active else None

    def _count(self, tokens: I32) -> Tensor:
        """int32 [part.size] how often each token occurs."""
        here = tokens[self.part.has(tokens)] - self.part.first
        counts = np.bincount(here, minlength=self.part.size).astype(np.int32)
        return upload(counts, self._device)

    def _take(self) -> int:
        if not self._free:
            size = self.output_counts.size(0)
            added = max(1, size)
            self._free = list(range(size, size + added))
            self.output_counts = torch.cat((self.output_counts, self.output_counts.new_zeros(added, self.part.size)))
            self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros(added, self.part.size)))
        return self._free.pop()


class BoundPenalties:
    """Penalties of the rows that have some."""

    def __init__(self, owner: Penalties, active: dict[int, Strength], device: torch.device) -> None:
        self._owner = owner
        strengths = list(active.values())
        self._rows = upload(list(active), device)
        self._places = upload([s.place for s in strengths], device)
        self._repetition = _column([s.repetition for s in strengths], 1.0, device)
        self._presence = _column([s.presence for s in strengths], 0.0, device)
        self._frequency = _column([s.frequency for s in strengths], 0.0, device)

    def apply(self, logits: Tensor, positions: Positions) -> None:
        counts = self._owner.output_counts[self._places]  # [num_active, part.size]
        if positions.drafts is not None:
            places, here = self._owner.part.places(positions.drafts[self._rows])
            counts.scatter_add_(1, places, here.int())
        occurred = counts > 0
        changed = logits[self._rows]
        if self._repetition is not None:
            repeated = torch.where(changed > 0, changed / self._repetition, changed * self._repetition)
            changed = torch.where(occurred | self._owner.in_prompt[self._places], repeated, changed)
        if self._frequency is not None:
            changed -= self._frequency * counts
        if self._presence is not None:
            changed -= self._presence * occurred
        logits[self._rows] = changed

    def sampled(self, token_ids: Tensor) -> None:
        new, here = self._owner.part.places(token_ids[self._rows])
        self._owner.output_counts.index_put_((self._places, new), here.int(), accumulate=True)


def _column(values: list[float], unused: float, device: torch.device) -> Tensor | None:
    """float32 [num_active, 1]; None if no row uses it."""
    if all(value == unused for value in values):
        return None
    return upload(values, device, np.float32).unsqueeze(1)
