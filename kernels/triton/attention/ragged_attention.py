"""Bidirectional attention within each of several concatenated prompts.

Tiles of tokens are assigned on the device by `query_start`, as in chunk_attention; a program has one head of one tile.
Keys and values are read in place from the projection's output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.attention.attention_tile import (
    LOG2_E,
    MIN_DOT,
    accumulate,
    dot_precision,
    padded_head_dim,
    tile_keys,
)
from quire.kernels.triton.attention.chunk_attention import find_sequence
from quire.kernels.triton.attention.dense_attention import dense_attention, takes_dense


@dataclass(frozen=True)
class RaggedTuning:
    """Tile sizes, warps and stages of attention within prompts."""

    most_rows: int  # maximum rows of a tile
    keys: int  # positions of a tile with 128 16-bit elements; fewer with larger ones
    stages: int
    warps: int


# Derived, not measured; keys as in chunk_attention.
TUNING = ByCapability({SM90: RaggedTuning(most_rows=128, keys=64, stages=3, warps=4)})


@triton.jit
def attend_keys(
    q,
    k_ptr,
    v_ptr,
    start,
    begin,
    num_tokens,
    positions,
    reach,
    stride,
    scale,
    top,
    total,
    out,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    REACHES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Processes one tile of keys. `MASKED`: it may exceed the sequence or contain keys not visible to some row."""
    keys = start + tl.arange(0, TILE)
    at = tl.arange(0, WIDTH)
    places = (begin + keys).to(tl.int64)[:, None] * stride + at[None, :]
    if MASKED:
        inside = (keys < num_tokens)[:, None] & (at < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + places, mask=inside, other=0.0)
        v = tl.load(v_ptr + places, mask=inside, other=0.0)
    elif WIDTH != HEAD_DIM:
        k = tl.load(k_ptr + places, mask=(at < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_ptr + places, mask=(at < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + places)
        v = tl.load(v_ptr + places)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        seen = keys[None, :] < num_tokens
        if REACHES:
            distance = keys[None, :] - positions[:, None]
            seen = seen & (distance <= reach) & (distance >= -reach)
        scores = tl.where(seen, scores, float("-inf"))
    return accumulate(scores, v, top, total, out, PRECISION)


@triton.jit(do_not_specialize=["reach", "num_seqs"])
def _ragged_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    query_start_ptr,
    num_seen_ptr,
    out_ptr,
    scale,
    reach,
    num_seqs,
    stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    REACHES: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Computes the attention of one head for ROWS tokens of a sequence, to the keys of the same sequence."""
    head, tile = tl.program_id(0), tl.program_id(1)
    seq = find_sequence(query_start_ptr, tile, num_seqs, ROWS)
    begin = tl.load(query_start_ptr + seq)
    num_tokens = tl.load(query_start_ptr + seq + 1) - begin
    token = (tile - (begin // ROWS + seq)) * ROWS
    if token >= num_tokens:
        return
    positions = token + tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    inside = (positions < num_tokens)[:, None] & (at < HEAD_DIM)[None, :]
    rows = (begin + positions).to(tl.int64)[:, None]
    q_ptr, k_ptr, v_ptr = q_ptr + head * HEAD_DIM, k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM
    q = tl.load(q_ptr + rows * stride + at[None, :], mask=inside, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    num_keys = num_tokens
    if COUNTED:
        num_keys = tl.minimum(tl.load(num_seen_ptr + seq), num_tokens)
    if REACHES:
        first = tl.maximum(token - reach, 0) // TILE * TILE
        end = tl.minimum(token + ROWS + reach, num_keys)
        masked_from = first
    else:
        first, end = 0, num_keys
        masked_from = num_keys // TILE * TILE
    for start in tl.range(first, masked_from, TILE, num_stages=STAGES):
        top, total, out = attend_keys(
            q, k_ptr, v_ptr, start, begin, num_keys, positions, reach, stride, scale, top, total, out,
            HEAD_DIM, WIDTH, TILE, PRECISION, REACHES, False,
        )  # fmt: skip
    for start in tl.range(masked_from, end, TILE, num_stages=STAGES if REACHES else 1):
        top, total, out = attend_keys(
            q, k_ptr, v_ptr, start, begin, num_keys, positions, reach, stride, scale, top, total, out,
            HEAD_DIM, WIDTH, TILE, PRECISION, REACHES, True,
        )  # fmt: skip
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    places = (rows * HEADS + head) * HEAD_DIM + at[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=inside)


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    longest: int,
    scale: float,
    reach: int,
    num_seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes bidirectional attention within each sequence, or within `reach`, [num_tokens, num_heads, head_dim]; q, k
    and v may be slices of one projection, with equal strides."""
    num_tokens, heads, head_dim = q.shape
    num_seqs = query_start.size(0) - 1
    assert q.stride() == k.stride() == v.stride()
    assert q.stride(1) == head_dim
    assert q.stride(2) == 1
    if num_seen is None and not 0 < reach < longest - 1 and takes_dense(q, num_seqs, longest):
        return dense_attention(q, k, v, longest, scale)
    rows, tuning = MIN_DOT, TUNING.here
    while rows < min(longest, tuning.most_rows):
        rows *= 2
    tile = tile_keys(tuning.keys, head_dim, q.element_size())
    out = torch.empty((num_tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    _ragged_attention[(heads, num_tokens // rows + num_seqs)](
        q,
        k,
        v,
        query_start,
        query_start if num_seen is None else num_seen,
        out,
        scale * LOG2_E,
        reach,
        num_seqs,
        q.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        WIDTH=padded_head_dim(head_dim),
        ROWS=rows,
        TILE=tile,
        STAGES=tuning.stages,
        PRECISION=dot_precision(q.element_size()),
        REACHES=0 < reach < longest - 1,
        COUNTED=num_seen is not None,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return out
