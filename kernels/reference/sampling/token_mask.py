"""Banning what a grammar does not allow."""

from __future__ import annotations

import torch

MASK_BITS = 32


def mask_logits(
    logits: torch.Tensor, rows: torch.Tensor | None, masks: torch.Tensor, places: torch.Tensor | None = None
) -> None:
    """logits[rows[i], t] = -inf for every token t whose bit is not set in masks[places[i]].

    logits: [num_rows, vocab_size], float32 or, on CUDA, 16 bits wide; changed in place
    rows: int64 [num_masks], no row twice; None: masks are of all rows, in order
    masks: int32 [.., ceil(vocab_size / 32)]: token t is bit t % 32 of word t // 32. Pinned memory of the host will do
    for logits on CUDA
    places: int64 [num_masks]; None: masks are num_masks, in order
    """
    masks = masks.to(logits.device)
    if places is not None:
        masks = masks[places]
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=masks.device)
    bits = (masks.unsqueeze(2) >> shifts) & 1
    banned = (bits == 0).flatten(1)[:, : logits.size(1)]
    if rows is None:
        logits.masked_fill_(banned, float("-inf"))
    else:
        logits[rows] = logits[rows].masked_fill(banned, float("-inf"))
