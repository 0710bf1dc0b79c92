"""top_n_sigma: keeps only tokens whose logit is at most n standard deviations below the largest one.

As in Tang et al., "Top-nσ: Not All Logits Are You Need" (2024), and llama.cpp, the deviation is that of the logits that
are not banned. The kept tokens are the same at any temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.vocabulary.port import Vocabulary
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows


class TopNSigma:
    """Sampling feature that holds the number of standard deviations for each slot that asks for it."""

    parameters = frozenset({"top_n_sigma"})

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._slots: dict[int, float] = {}

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the slot's top_n_sigma if it is above 0; otherwise does nothing."""
        if admission.sampling.top_n_sigma > 0:
            self._slots[slot] = admission.sampling.top_n_sigma

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def bind(self, slots: Rows) -> BoundTopNSigma | None:
        """Prepares the rows of slots that use the filter; None if there are none."""
        if not self._slots:
            return None
        active = {row: self._slots[slot] for row, slot in enumerate(slots.tolist()) if slot in self._slots}
        return BoundTopNSigma(active, self._vocabulary, self._device) if active else None


class BoundTopNSigma:
    """Numbers of standard deviations of the rows that ask for the filter, on the device."""

    def __init__(self, active: dict[int, float], vocabulary: Vocabulary, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._rows = upload(list(active), device)
        self._sigmas = upload(list(active.values()), device, "float32")[:, None]

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Sets logits further than n standard deviations below the row's largest one to -inf, in place. With a sharded
        vocabulary it runs collectives, so that all ranks must call it for the same rows."""
        total, largest = self._vocabulary.all_reduce_sum, self._vocabulary.all_reduce_max
        kept = logits[self._rows]  # [num_active, shard.size]
        possible = kept > float("-inf")
        count = total(possible.sum(dim=1, keepdim=True)).clamp(min=1)
        mean = total(kept.masked_fill(~possible, 0).sum(dim=1, keepdim=True)) / count
        squares = (kept - mean).masked_fill(~possible, 0).square().sum(dim=1, keepdim=True)
        least = largest(kept.amax(dim=1, keepdim=True)) - self._sigmas * total(squares).div(count).sqrt()
        logits[self._rows] = kept.masked_fill(kept < least, float("-inf"))

    def sampled(self, token_ids: Tensor) -> None:
        """Does nothing: the filter does not depend on earlier tokens."""
