"""Masking of logits by grammar bitmasks."""

from __future__ import annotations

import torch

MASK_BITS = 32


def mask_logits(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    masks: torch.Tensor,
    places: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """Sets logits[rows[i], t - first] = -inf for every token t whose bit is not set in masks[places[i]].

    logits: [num_rows, size], float32 or, on CUDA, 16 bits wide, of the tokens from `first` on; changed in place
    rows: int64 [num_masks], no row twice; None: masks are of all rows, in order
    masks: int32 [.., ceil(vocab_size / 32)], of the whole vocabulary: token t is bit t % 32 of word t // 32. Pinned
    memory of the host will do for logits on CUDA
    places: int64 [num_masks]; None: masks are num_masks, in order
    """
    size = logits.size(1)
    before = first // MASK_BITS
    masks = masks.to(logits.device)[:, before : -(-(first + size) // MASK_BITS)]
    if places is not None:
        masks = masks[places]
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=masks.device)
    bits = (masks.unsqueeze(2) >> shifts) & 1
    banned = (bits == 0).flatten(1)[:, first - before * MASK_BITS :][:, :size]
    logits = logits[:, : banned.size(1)]  # no tokens after the masks' last bit
    if rows is None:
        logits.masked_fill_(banned, float("-inf"))
    else:
        logits[rows] = logits[rows].masked_fill(banned, float("-inf"))
