"""All-reduce over ranks: the sum that every rank computes from all parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_of_ranks(parts: Sequence[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """Adds the parts of all ranks, of one shape and dtype, in rank order in float32, and rounds once.

    The sum therefore has the same bits on every rank. It is added to a `residual` in place, which is then the result.
    """
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    rounded = total.to(parts[0].dtype)
    return rounded if residual is None else residual.copy_(residual.float() + rounded.float())
