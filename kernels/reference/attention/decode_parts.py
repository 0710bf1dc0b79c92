"""Splits a decode step into parts that are computed at once, with their cache positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Keys gathered at a time. On listed devices lengths can be read on the host; more would exceed the CPU caches.
GATHERED_BYTES = {"cpu": 1 << 21}
MOST_GATHERED_BYTES = 1 << 28  # on any other device
LAST_BIT = 63  # of a tree mask


@dataclass(frozen=True)
class DecodePart:
    """Rows computed at once, padded to the one that sees the most cache positions.

    rows: of the step, in the order of `DecodeParts`
    places: int [num_rows * width], block * block_size + offset of a row's last `width` positions. Positions that
        a row does not see are replaced by its own, because a masked NaN would still spread
    seen: bool [num_rows, 1, 1, width]
    bias: `seen` as addends of scores in the queries' dtype, 0 or minus infinity
    """

    rows: slice
    places: torch.Tensor
    seen: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class DecodeParts:
    """All rows of a decode step; shared by layers with the same block table, window and cache shape.

    order, back: int64 [num_seqs], permutation of the step's rows to the order of the parts, and its inverse; None:
    identity
    """

    parts: list[DecodePart]
    order: torch.Tensor | None
    back: torch.Tensor | None


def gathered_bytes(device: torch.device) -> int:
    return GATHERED_BYTES.get(device.type, MOST_GATHERED_BYTES)


def decode_parts(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_cache: torch.Tensor,
    dtype: torch.dtype,
    sliding_window: int,
    chunked: bool = False,
    tree_mask: torch.Tensor | None = None,
) -> DecodeParts:
    """Splits a decode step; arguments as of `paged_attention`, one row per sequence; `dtype`: of the queries.

    On a CPU lengths are read: rows of similar length are computed together. On other devices there is no
    synchronization, and all rows are as long as the tables are wide.
    """
    device, block_size = seq_lens.device, k_cache.size(1)
    bytes_per_place = k_cache.size(2) * k_cache.size(3) * dtype.itemsize
    most = gathered_bytes(device) // bytes_per_place
    longest = block_tables.size(1) * block_size
    widths = seq_lens.tolist() if device.type in GATHERED_BYTES else [longest] * seq_lens.size(0)
    widths = [max(1, min(width, sliding_window or width)) for width in widths]
    rows = sorted(range(len(widths)), key=widths.__getitem__, reverse=True)
    cuts = _cuts([widths[row] for row in rows], most)
    order = back = None
    if len(cuts) > 1 and rows != sorted(rows):
        order = torch.tensor(rows, device=device)
        back = order.argsort()
        block_tables, seq_lens = block_tables.index_select(0, order), seq_lens.index_select(0, order)
        tree_mask = None if tree_mask is None else tree_mask.index_select(0, order)
    parts = []
    for cut in cuts:
        lens = seq_lens[cut].unsqueeze(1)
        width = max(widths[row] for row in rows[cut])
        positions = lens + torch.arange(-width, 0, device=device, dtype=lens.dtype)  # [num_rows, width]
        seen = positions >= 0
        if chunked:
            seen &= positions >= (lens - 1) // sliding_window * sliding_window
        if tree_mask is not None:
            seen &= in_path(lens - 1 - positions, tree_mask[cut])
        positions = positions.clamp_(min=0)
        places = block_tables[cut].gather(1, (positions // block_size).long()) * block_size + positions % block_size
        places = torch.where(seen, places, places[:, -1:])
        bias = torch.zeros((), dtype=dtype, device=device).masked_fill(~seen, float("-inf"))
        parts.append(DecodePart(cut, places.flatten(), seen[:, None, None], bias[:, None, None]))
    return DecodeParts(parts, order, back)


def _cuts(widths: list[int], most: int) -> list[slice]:
    """Cuts rows of descending widths into slices with at most `most` positions, each as wide as its first row, at least
    one row each."""
    cuts, begin = [], 0
    while begin < len(widths):
        end = begin + max(1, most // widths[begin])
        cuts.append(slice(begin, min(end, len(widths))))
        begin = end
    return cuts


def in_path(distances: torch.Tensor, tree_mask: torch.Tensor) -> torch.Tensor:
    """Looks up mask bits for `distances` [num_rows, num_keys] back from each row, negative ahead of it."""
    bits = tree_mask.unsqueeze(1) >> distances.clamp(0, LAST_BIT)
    return (bits & 1).bool() | (distances > LAST_BIT)
