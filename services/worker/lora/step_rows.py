"""Which tokens of the step that is computed now go through which adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from kernels.reference.low_rank import AdaptedRows
from services.worker.device.staging import Staging, aligned
from services.worker.step.slots import Rows
from shared.columns import I32

NO_ADAPTER = -1


class StepRows:
    """Written by the runner before a step, read by linear layers. Its memory stays where it is: recordings of steps
    read it at every replay."""

    def __init__(self, most: int, num_adapters: int, device: torch.device, staging: Staging) -> None:
        """`most`: tokens of a step."""
        self._staging = staging
        self._order = aligned(num_adapters + 1)  # where tokens begin
        self._flat = torch.zeros(self._order + most, dtype=torch.int32, device=device)
        numbers = torch.zeros(most if device.type == "cpu" else 0, dtype=torch.int32)
        self.rows = AdaptedRows(self._flat[: num_adapters + 1], self._flat[self._order :], numbers)
        # Whether layers look for adapters in the step that is computed, or recorded, now. On the CPU they always do:
        # what a tape holds is for steps of all kinds.
        self.is_active = self._is_always = device.type == "cpu"

    def write(self, of_tokens: I32 | Rows) -> None:
        """The adapter of each token, NO_ADAPTER for those without; behind the steps launched so far."""
        numbers = of_tokens[of_tokens != NO_ADAPTER]
        self.is_active = self._is_always or len(numbers) > 0
        if not self.is_active:
            return
        order = np.argsort(of_tokens, kind="stable")[len(of_tokens) - len(numbers) :]
        starts = np.zeros(self._order, dtype=np.int32)
        counts = np.bincount(numbers, minlength=self.rows.num_adapters)
        np.cumsum(counts, out=starts[1 : self.rows.num_adapters + 1])
        words = np.concatenate([starts, order])
        self._staging.upload_into(self._flat[: len(words)].view(1, -1), [words], [0])
        if len(self.rows.numbers):
            self.rows.numbers.numpy()[: len(order)] = of_tokens[order]

    @contextmanager
    def as_if(self, active: bool) -> Iterator[None]:
        """While steps are recorded."""
        before, self.is_active = self.is_active, active
        try:
            yield
        finally:
            self.is_active = before
