"""Which rows of the step that is computed now go through which adapter: its tokens, and those of the output head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from quire.kernels.reference.low_rank import AdaptedRows
from quire.services.worker.device.staging import Array, Staging, aligned
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

NO_ADAPTER = -1


class StepAdapterRows:
    """Written by the runner before a step, read by linear layers. Its memory stays where it is: recordings of steps
    read it at every replay."""

    def __init__(self, most: int, num_adapters: int, device: torch.device, staging: Staging) -> None:
        """`most`: tokens of a step."""
        self._tokens, self._logits = (_SortedRows(most, num_adapters, device, staging) for _ in range(2))
        # Whether layers look for adapters in the step that is computed, or recorded, now. On the CPU they always do:
        # what a tape holds is for steps of all kinds.
        self.is_active = self._is_always = device.type == "cpu"

    @property
    def rows(self) -> AdaptedRows:
        """Of the step's tokens."""
        return self._tokens.rows

    @property
    def logit_rows(self) -> AdaptedRows:
        """Of what the output head reads in this step."""
        return self._logits.rows

    def write(self, of_tokens: I32 | Rows) -> None:
        """The adapter of each token, NO_ADAPTER for those without; behind the steps launched so far."""
        self.is_active = self._is_always or bool((of_tokens != NO_ADAPTER).any())
        if self.is_active:
            self._tokens.write(of_tokens)

    def write_logits(self, of_rows: I32 | Rows) -> None:
        """The same of the output head's rows; after write()."""
        if self.is_active:
            self._logits.write(of_rows)

    @contextmanager
    def recording_with(self, active: bool) -> Iterator[None]:
        """While steps are recorded."""
        before, self.is_active = self.is_active, active
        try:
            yield
        finally:
            self.is_active = before


class _SortedRows:
    """By adapter."""

    def __init__(self, most: int, num_adapters: int, device: torch.device, staging: Staging) -> None:
        self._staging = staging
        self._order = aligned(num_adapters + 1)  # where rows begin
        self._flat = torch.zeros(self._order + most, dtype=torch.int32, device=device)
        numbers = torch.zeros(most if device.type == "cpu" else 0, dtype=torch.int32)
        self.rows = AdaptedRows(self._flat[: num_adapters + 1], self._flat[self._order :], numbers)

    def write(self, of_rows: I32 | Rows) -> None:
        starts, order = sorted_rows(of_rows, self.rows.num_adapters)
        words = np.concatenate([starts, np.zeros(self._order - len(starts), np.int32), order])
        self._staging.upload_into(self._flat[: len(words)].view(1, -1), [words], [0])
        if len(self.rows.numbers):
            self.rows.numbers.numpy()[: len(order)] = of_rows[order]


def sorted_rows(of_rows: I32 | Rows, num_adapters: int) -> tuple[Array, Array]:
    """Where each adapter's rows begin, with the end of all, and the rows in that order."""
    numbers = of_rows[of_rows != NO_ADAPTER]
    order = np.argsort(of_rows, kind="stable")[len(of_rows) - len(numbers) :]
    starts = np.zeros(num_adapters + 1, dtype=np.int32)
    np.cumsum(np.bincount(numbers, minlength=num_adapters), out=starts[1:])
    return starts, order
