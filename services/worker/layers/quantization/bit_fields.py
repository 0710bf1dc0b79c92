"""Unpacks codes of a few bits from 32-bit words, lowest bits first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WORD = 32


def unpacked(words: Tensor, bits: int, dim: int, *, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpacks int32 words to uint8 codes, WORD / bits times as many along `dim`.

    `order`: index of the code that each field of a word has, lowest bits first; None: in sequence.
    """
    import torch

    count = WORD // bits
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    if order is not None:
        shifts = shifts[[order.index(place) for place in range(count)]]
    codes = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & (2**bits - 1)
    flat: Tensor = codes.to(torch.uint8).flatten(-2).movedim(-1, dim)
    return flat
