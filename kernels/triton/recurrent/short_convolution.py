"""Short convolution: a program has some channels of one row and processes its tokens in order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.state_pages import StatePages


@dataclass(frozen=True)
class ConvolutionTuning:
    """Channels and tokens per program of the convolution."""

    tokens: int  # tokens of a tile
    channels: int
    decode_channels: int


TUNING = ByCapability({SM90: ConvolutionTuning(tokens=16, channels=256, decode_channels=512)})  # not measured yet


@triton.jit
def _convolve(
    x_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    out_ptr,
    inputs_ptr,
    page_stride,
    table_ptr,
    table_stride,
    start_ptr,
    len_ptr,
    num_channels,
    block_size,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DECODE: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Computes short_convolution() for CHANNELS channels of a row, TOKENS tokens at a time, and stores the inputs for
    later steps. KEPT: a power of two, at least WIDTH - 1."""
    row = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < num_channels
    if DECODE:
        begin, end = row, row + 1
    else:
        begin, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
    count, seq_len = end - begin, tl.load(len_ptr + row)
    if (count == 0) | (seq_len == 0):
        if DECODE:
            tl.store(out_ptr + row.to(tl.int64) * num_channels + channels, 0.0, mask=inside)
        return
    first = seq_len - count
    table_ptr += row.to(tl.int64) * table_stride
    read = tl.load(table_ptr + (first - 1) // block_size, mask=first > 0, other=0).to(tl.int64)
    x_ptr += begin.to(tl.int64) * x_stride
    before_ptr = inputs_ptr + read * page_stride + (WIDTH - 1) * num_channels  # after the last input
    for at in range(0, count, TOKENS):
        tokens = at + tl.arange(0, TOKENS)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for tap in tl.static_range(WIDTH):
            source = (tokens - (WIDTH - 1) + tap)[:, None]
            new = (source >= 0) & (source < count) & inside[None, :]
            x = tl.load(x_ptr + source.to(tl.int64) * x_stride + channels[None, :], mask=new, other=0.0).to(tl.float32)
            old = (source < 0) & (source >= -first) & inside[None, :]
            x += tl.load(before_ptr + source * num_channels + channels[None, :], mask=old, other=0.0)
            weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
            total += x * weight[None, :]
        if BIASED:
            total += tl.load(bias_ptr + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
        places = (begin + tokens).to(tl.int64)[:, None] * num_channels + channels[None, :]
        found = total * tl.sigmoid(total)
        tl.store(out_ptr + places, found.to(out_ptr.dtype.element_ty), mask=(tokens < count)[:, None] & inside[None, :])
    # Inputs for later steps, at the end of the row and of each filled block, the last first: only the first
    # of these may be in the page that is read.
    kept = tl.arange(0, KEPT)
    wanted = (kept < WIDTH - 1)[:, None] & inside[None, :]
    last = (seq_len - 1) // block_size
    for back in range(0, last - first // block_size + 1):
        block = last - back
        behind = tl.minimum(seq_len, (block + 1) * block_size) - first
        source = (behind - (WIDTH - 1) + kept)[:, None]
        new = (source >= 0) & wanted
        value = tl.load(x_ptr + source.to(tl.int64) * x_stride + channels[None, :], mask=new, other=0.0).to(tl.float32)
        old = (source < 0) & (source >= -first) & wanted
        value += tl.load(before_ptr + source * num_channels + channels[None, :], mask=old, other=0.0)
        tl.debug_barrier()  # everything is read before anything is written
        written = tl.load(table_ptr + block).to(tl.int64)
        places = written * page_stride + kept[:, None] * num_channels + channels[None, :]
        tl.store(inputs_ptr + places, value, mask=wanted)


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
    """Computes silu(bias + convolution) of x [num_tokens, num_channels], -> the same shape, and stores the inputs for
    later steps in the pages. `query_start` None: one token per row."""
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    num_tokens, num_channels = x.shape
    out = torch.empty((num_tokens, num_channels), dtype=x.dtype, device=x.device)
    num_rows, decode = block_tables.size(0), query_start is None
    if not num_tokens or not num_rows:
        return out
    tuning = TUNING.here
    most = tuning.decode_channels if decode else tuning.channels
    channels = min(most, triton.next_power_of_2(num_channels))
    _convolve[(num_rows, triton.cdiv(num_channels, channels))](
        x,
        x.stride(0),
        weight,
        weight if bias is None else bias,
        out,
        pages.first,
        pages.first.stride(0),
        block_tables,
        block_tables.stride(0),
        seq_lens if query_start is None else query_start,
        seq_lens,
        num_channels,
        block_size,
        WIDTH=pages.shape.conv_width,
        KEPT=triton.next_power_of_2(pages.shape.conv_width - 1),
        TOKENS=1 if decode else tuning.tokens,
        CHANNELS=channels,
        DECODE=decode,
        BIASED=bias is not None,
    )
    return out
