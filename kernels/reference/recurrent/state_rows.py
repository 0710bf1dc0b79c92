"""Which pages the rows of a step read their states from, and where they leave them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class DecodePages(NamedTuple):
    """Of a step in which every row has one token; int64 [num_rows]."""

    read: torch.Tensor
    written: torch.Tensor
    goes_on: torch.Tensor  # bool: whether there was a token before


class TokenSpan(NamedTuple):
    """Tokens of a row, which end a block, a chunk or the step."""

    begin: int  # in the step
    end: int
    read: int  # the page that holds the state before; -1: the row begins, or goes on from the span before
    written: int  # the page that gets the state behind; -1: none
    begins: bool  # nothing comes before


def decode_pages(block_tables: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> DecodePages:
    """Rows without tokens, which recordings have, write where their table says: into the null block."""
    last = seq_lens.long() - 1
    tables = block_tables.long()
    read, written = (
        tables.gather(1, (at.clamp(min=0) // block_size).unsqueeze(1)).squeeze(1) for at in (last - 1, last)
    )
    return DecodePages(read, written, last > 0)


def spans(
    block_tables: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, block_size: int, longest: int
) -> Iterator[TokenSpan]:
    """Row after row, each in order; at most `longest` tokens a span, and none over the end of a block."""
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
