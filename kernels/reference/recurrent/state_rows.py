"""Pages from which the rows of a step read their states, and to which they write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class DecodePages(NamedTuple):
    """Pages of a decode step; int64 [num_rows]."""

    read: torch.Tensor
    written: torch.Tensor
    goes_on: torch.Tensor  # bool: whether the row has earlier tokens


class TokenSpan(NamedTuple):
    """Consecutive tokens of a row that end at a block, a chunk or the step."""

    begin: int  # token index in the step
    end: int
    read: int  # page of the previous state; -1: the row starts, or continues the previous span
    written: int  # page to write the state to; -1: none
    begins: bool  # the row starts


def decode_pages(block_tables: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> DecodePages:
    """Returns the pages that each row of a decode step reads and writes, and whether it has earlier tokens; padding
    rows without tokens write to the null block."""
    last = seq_lens.long() - 1
    tables = block_tables.long()
    read, written = (
        tables.gather(1, (at.clamp(min=0) // block_size).unsqueeze(1)).squeeze(1) for at in (last - 1, last)
    )
    return DecodePages(read, written, last > 0)


def spans(
    block_tables: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, block_size: int, longest: int
) -> Iterator[TokenSpan]:
    """Yields the spans of each row in order, at most `longest` tokens each, none across the end of a block. Reads the
    lengths on the host."""
    starts = query_start.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        first = position = seq_len - (starts[row + 1] - starts[row])
        while position < seq_len:
            end = min(position + longest, (position // block_size + 1) * block_size, seq_len)
            reads = position == first > 0
            saves = end == seq_len or end % block_size == 0
            yield TokenSpan(
                starts[row] + position - first,
                starts[row] + end - first,
                int(block_tables[row, (position - 1) // block_size]) if reads else -1,
                int(block_tables[row, (end - 1) // block_size]) if saves else -1,
                position == 0,
            )
            position = end
