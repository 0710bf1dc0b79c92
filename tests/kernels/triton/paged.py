"""Paged sequences on a device, and exact attention over them in float64."""

from __future__ import annotations

import torch

from tests.kernels.cpu import paged as on_cpu
from tests.kernels.cpu.paged import NAN, Paged

Rows = list[tuple[int, int, int]]

__all__ = ["NAN", "Case", "Rows"]


class Case:
    """Sequences whose unowned cache positions are NaN."""

    def __init__(
        self,
        seq_lens: list[int],
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.paged: Paged = on_cpu.paged(seq_lens, *heads, head_dim, block_size, dtype)
        self.scale = head_dim**-0.5
        self._device = device

    def step(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        """Returns the arguments for rows [begin, end) of each (sequence, begin, end)."""
        return tuple(tensor.to(self._device) for tensor in self.paged.step(rows))

    def exact(
        self, rows: Rows, window: int = 0, *, chunked: bool = False, seen_ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k_cache, v_cache = [t.to(self._device) for t in self.paged.q], self.paged.k_cache, self.paged.v_cache
        there = Paged(q, k_cache.to(self._device), v_cache.to(self._device), self.paged.tables)
        return on_cpu.exact(there, rows, self.scale, window, chunked=chunked, seen_ends=seen_ends)
