"""Sums over ranks: what every rank computes from what all of them have."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_of_ranks(parts: Sequence[torch.Tensor], residual: torch.Tensor | None = None) -> torch.Tensor:
    """`parts`: of each rank, in the order of ranks, all of one shape and dtype. They are added up in that order in
    float32 and rounded once, so that the sum has the same bits on every rank. A `residual` gets it added, in place, and
    is the result.
    """
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    rounded = total.to(parts[0].dtype)
    return rounded if residual is None else residual.copy_(residual.float() + rounded.float())
