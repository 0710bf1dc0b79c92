"""Causal depthwise convolution over a few tokens, before recurrent layers (arXiv 2312.00752)."""

from __future__ import annotations

import torch
from torch.nn import functional

from quire.kernels.reference.recurrent.state_rows import decode_pages, spans
from quire.kernels.state_pages import StatePages

LONGEST = 1 << 30


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    pages: StatePages,
    block_tables: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    block_size: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes silu(bias + sum over the last tokens of x * weight), and stores the inputs for later steps in the pages.

    x: [num_tokens, num_channels], concatenated sequences; channels of a token contiguous
    weight: [num_channels, conv_width], the present token's last; before a sequence's first token there are zeros
    pages: inputs are read from the page of the position before a row's first token, and written to the page of every
        position at which a block or the row ends: what is in a full block's page stays
    block_tables: int32 [num_seqs, width], the pages of each sequence in order; block 0 is the null block
    query_start: None if every sequence has one token; else int32 [num_seqs + 1], tokens of sequence i are
        query_start[i] to query_start[i + 1], and there may be none
    seq_lens: int32 [num_seqs], positions of each sequence, these tokens included
    bias: [num_channels], or None
    Returns [num_tokens, num_channels] in x's dtype.

    Unused pages may hold anything, including NaN. No page that a row of the step writes is read by
    another one.
    """
    if query_start is None:
        return _decode(x, weight, pages, block_tables, seq_lens, block_size, bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kept, inputs = pages.shape.conv_width - 1, pages.inputs
    before = inputs[:0]
    for span in spans(block_tables, query_start, seq_lens, block_size, LONGEST):
        if span.begins:
            before = torch.zeros_like(inputs[0])
        elif span.read >= 0:
            before = inputs[span.read]
        seen = torch.cat((before, x[span.begin : span.end].float()))
        length = span.end - span.begin
        taps = weight.float().unbind(1)
        begin = torch.zeros_like(seen[:length]) if bias is None else bias.float().expand(length, -1)
        summed = sum((seen[i : i + length] * tap for i, tap in enumerate(taps)), begin)
        out[span.begin : span.end] = functional.silu(summed).to(x.dtype)
        before = seen[length : length + kept]
        if span.written >= 0:
            inputs[span.written] = before
    return out


def _decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    pages: StatePages,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Computes short_convolution() where every row has one token: x [num_rows, num_channels] -> the same shape.

    Reads the earlier inputs from the page of the row's previous position, and writes the latest conv_width - 1 inputs
    to the page of its present one. No length is copied to the host.
    """
    of_rows, inputs = decode_pages(block_tables, seq_lens, block_size), pages.inputs
    before = inputs[of_rows.read].masked_fill(~of_rows.goes_on[:, None, None], 0)
    seen = torch.cat((before, x.float().unsqueeze(1)), dim=1)  # [num_rows, conv_width, num_channels]
    inputs[of_rows.written] = seen[:, 1:]
    summed = (seen * weight.float().t()).sum(1)
    return functional.silu(summed if bias is None else summed + bias.float()).to(x.dtype)
