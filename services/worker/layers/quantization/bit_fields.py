"""Codes of a few bits in words of 32, the first in the lowest bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WORD = 32


def unpacked(words: Tensor, bits: int, dim: int, *, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words -> uint8 codes, WORD / bits times as many along `dim`. `order`: which of a word's codes each field
    holds, if not the one of its own number."""
    import torch

    count = WORD // bits
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    if order is not None:
        shifts = shifts[[order.index(place) for place in range(count)]]
    codes = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & (2**bits - 1)
    flat: Tensor = codes.to(torch.uint8).flatten(-2).movedim(-1, dim)
    return flat
