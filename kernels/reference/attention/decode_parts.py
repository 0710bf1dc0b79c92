"""Of a decode step, which has one row of each sequence: what is computed at once, and where in the cache it lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of keys, at a time. On devices that are named here lengths can be read, and more has left the caches when it is used.
GATHERED_BYTES = {"cpu": 1 << 21}
MOST_GATHERED_BYTES = 1 << 28  # on any other device
LAST_BIT = 63  # of a tree's mask


@dataclass(frozen=True)
class DecodePart:
    """Rows that are computed at once: each meets as many places of the cache as the one that sees most.

    rows: of the step, in its `DecodeParts`' order
    places: int [num_rows * width], block * block_size + offset of a row's last `width` positions. In the stead of what
        a row does not see stands its own place, for a NaN that is masked would still spread
    seen: bool [num_rows, 1, 1, width]
    bias: the same as numbers to add to scores in the queries' dtype, 0 or minus infinity
    """

    rows: slice
    places: torch.Tensor
    seen: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class DecodeParts:
    """All rows of a decode step. The same for all layers with one table of blocks, one window and caches of one shape.

    order, back: int64 [num_seqs], the step's rows as parts have them, and where each of them went; None: as they come
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
    """Arguments as `paged_attention` has them, of which each row is a sequence's; `dtype` is the queries'.

    On a CPU lengths are read: rows of like length are computed together. On other devices nothing waits for them, and
    all rows are as long as the tables are wide.
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
    """Of rows that need less and less: as many at once as have no more than `most` places, each with the first's."""
    cuts, begin = [], 0
    while begin < len(widths):
        end = begin + max(1, most // widths[begin])
        cuts.append(slice(begin, min(end, len(widths))))
        begin = end
    return cuts


def in_path(distances: torch.Tensor, tree_mask: torch.Tensor) -> torch.Tensor:
    """`distances` [num_rows, num_keys] back from each row, negative ahead of it -> whether its mask has the bit."""
    bits = tree_mask.unsqueeze(1) >> distances.clamp(0, LAST_BIT)
    return (bits & 1).bool() | (distances > LAST_BIT)
