"""Maps the rows of the current step to adapters: its tokens, and the rows of the output head."""

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
    """Rows of the current step by adapter, on the device: written by the runner before a step and read by linear
    layers. Their memory has fixed addresses: recorded steps read it at every replay."""

    def __init__(self, most: int, num_adapters: int, device: torch.device, staging: Staging) -> None:
        """`most`: maximum tokens of a step."""
        self._tokens, self._logits = (_SortedRows(most, num_adapters, device, staging) for _ in range(2))
        # Whether layers apply adapters in the current or recorded step. On the CPU they always do: a tape serves steps
        # of all kinds.
        self.is_active = self._is_always = device.type == "cpu"

    @property
    def rows(self) -> AdaptedRows:
        """Rows of the step's tokens."""
        return self._tokens.rows

    @property
    def logit_rows(self) -> AdaptedRows:
        """Rows that the output head reads in this step."""
        return self._logits.rows

    def write(self, of_tokens: I32 | Rows) -> None:
        """Sets `is_active` and uploads the adapter number of each token, NO_ADAPTER for those without, ordered after
        the steps launched so far; uploads nothing for a step without adapters on a GPU."""
        self.is_active = self._is_always or bool((of_tokens != NO_ADAPTER).any())
        if self.is_active:
            self._tokens.write(of_tokens)

    def write_logits(self, of_rows: I32 | Rows) -> None:
        """Uploads the adapter number of each row of the output head, after write(); nothing for a step without adapters
        on a GPU."""
        if self.is_active:
            self._logits.write(of_rows)

    @contextmanager
    def recording_with(self, active: bool) -> Iterator[None]:
        """Context manager that sets `is_active` while steps are recorded, and restores it afterwards."""
        before, self.is_active = self.is_active, active
        try:
            yield
        finally:
            self.is_active = before


class _SortedRows:
    """Row indices of a step on the device, sorted by adapter, in one buffer of fixed address for up to `most` rows."""

    def __init__(self, most: int, num_adapters: int, device: torch.device, staging: Staging) -> None:
        self._staging = staging
        self._order = aligned(num_adapters + 1)  # offset of the row indices
        self._flat = torch.zeros(self._order + most, dtype=torch.int32, device=device)
        numbers = torch.zeros(most if device.type == "cpu" else 0, dtype=torch.int32)
        self.rows = AdaptedRows(self._flat[: num_adapters + 1], self._flat[self._order :], numbers)

    def write(self, of_rows: I32 | Rows) -> None:
        """Uploads row indices sorted by adapter and each adapter's first one, in one copy."""
        starts, order = sorted_rows(of_rows, self.rows.num_adapters)
        words = np.concatenate([starts, np.zeros(self._order - len(starts), np.int32), order])
        self._staging.upload_into(self._flat[: len(words)].view(1, -1), [words], [0])
        if len(self.rows.numbers):
            self.rows.numbers.numpy()[: len(order)] = of_rows[order]


def sorted_rows(of_rows: I32 | Rows, num_adapters: int) -> tuple[Array, Array]:
    """Returns the first row of each adapter and the end of all, [num_adapters + 1], as indices into the second result:
    the row indices sorted by adapter, without those of no adapter."""
    numbers = of_rows[of_rows != NO_ADAPTER]
    order = np.argsort(of_rows, kind="stable")[len(of_rows) - len(numbers) :]
    starts = np.zeros(num_adapters + 1, dtype=np.int32)
    np.cumsum(np.bincount(numbers, minlength=num_adapters), out=starts[1:])
    return starts, order
