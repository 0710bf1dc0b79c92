"""Causal attention of chunks of any lengths over their sequences' blocks: prompts, parts of them and single rows.

The rows of a tile are the query heads of one kv head for some tokens, so keys and values are loaded once for all of
them. The tokens of a tile are found on the device from `query_start`, as if every sequence started at a new tile, which
takes at most num_tokens / tokens per tile + num_seqs tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.attention.attention_tile import (
    LOG2_E,
    accumulate,
    dot_precision,
    find_blocks,
    first_seen,
    load_tile,
    meeting,
    padded_head_dim,
    soft_cap,
    tile_keys,
)
from quire.kernels.triton.precompile.shapes import TABLE_WIDTH, Calls, ModelShape, ints, longs

LAST_BIT = tl.constexpr(63)  # of a tree mask (kernels/reference/attention/paged_attention.py)


@dataclass(frozen=True)
class ChunkTuning:
    """Tuning of attention of chunks and of shared prefixes."""

    rows: int  # of a tile: query heads of one kv head for some tokens
    keys: int  # positions of a tile with 128 16-bit elements; fewer with larger ones
    stages: int  # buffers for tiles of keys and values
    warps: int


# 64 rows are one warp group's matrix instruction; 64 positions in 3 buffers are the fastest of those tried on an H200.
TUNING = ByCapability({SM90: ChunkTuning(rows=64, keys=64, stages=3, warps=4)})


@triton.jit
def in_path(distances, row_masks):
    """Looks up mask bits for `distances` [ROWS, TILE] back from each row, negative ahead of it."""
    bits = row_masks[:, None] >> tl.minimum(tl.maximum(distances, 0), LAST_BIT).to(tl.int64)
    return ((bits & 1) != 0) | (distances > LAST_BIT)


@triton.jit
def attend_tile(
    q,
    k_cache_ptr,
    v_cache_ptr,
    k_tiles,
    v_tiles,
    table_ptr,
    blocks,
    start,
    first,
    end,
    kv_head,
    row_positions,
    window,
    scale,
    top,
    total,
    out,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    CHUNKED: tl.constexpr = False,
    row_masks=None,
    row_ends=None,
):
    """Processes one tile of keys; returns the blocks of the next one, too.

    `MASKED`: some rows may not see all of it. `row_masks`: int64 [ROWS] for rows in trees; None: compiled without tree
    masks. `row_ends`: int32 [ROWS] positions after the last one that each row sees; None: compiled as causal.
    """
    positions = start + tl.arange(0, TILE)
    if TMA:
        place = blocks * BLOCK_SIZE + start % BLOCK_SIZE
        k = k_tiles.load([place, kv_head * HEAD_DIM])
        v = v_tiles.load([place, kv_head * HEAD_DIM])
        if MASKED:  # positions beyond may be NaN
            v = tl.where(((positions >= first) & (positions < end))[:, None], v, 0.0)
    else:
        k = load_tile(k_cache_ptr, blocks, start, first, end, kv_head, KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, TILE)
        v = load_tile(v_cache_ptr, blocks, start, first, end, kv_head, KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, TILE)
    k, v = k.to(q.dtype), v.to(q.dtype)
    blocks = find_blocks(table_ptr, start + TILE, end, BLOCK_SIZE, TILE)
    scores = soft_cap(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, SOFTCAP)
    if MASKED:
        if row_ends is not None:
            seen = positions[None, :] < row_ends[:, None]
        else:
            seen = positions[None, :] <= row_positions[:, None]
        if CHUNKED:
            seen = seen & (positions[None, :] >= (row_positions // window * window)[:, None])
        else:
            seen = seen & ((window == 0) | (positions[None, :] > row_positions[:, None] - window))
        if row_masks is not None:
            seen = seen & in_path(row_positions[:, None] - positions[None, :], row_masks)
        scores = tl.where(seen, scores, float("-inf"))
    top, total, out = accumulate(scores, v, top, total, out, PRECISION)
    return blocks, top, total, out


@triton.jit
def find_sequence(query_start_ptr, tile, num_seqs, TOKENS: tl.constexpr):
    """Returns the last sequence with a first tile up to `tile`; sequence i starts at tile query_start[i] / TOKENS +
    i."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        before = tl.load(query_start_ptr + middle) // TOKENS + middle <= tile
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low - 1


@triton.jit(do_not_specialize=["table_width", "window", "num_seqs"])
def _chunk_attention(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_tiles,
    v_tiles,
    tables_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    tree_mask_ptr,
    seen_ends_ptr,
    out_ptr,
    scale,
    table_width,
    window,
    num_seqs,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Attends with the query heads of one kv head for TOKENS tokens of a sequence."""
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # a prompt's last tiles read the most keys: start them first
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    seq = find_sequence(query_start_ptr, tile, num_seqs, TOKENS)
    query_start = tl.load(query_start_ptr + seq)
    num_tokens = tl.load(query_start_ptr + seq + 1) - query_start
    token = (tile - (query_start // TOKENS + seq)) * TOKENS
    if token >= num_tokens:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    past = seq_len - num_tokens
    last_token = tl.minimum(token + TOKENS, num_tokens) - 1

    row = tl.arange(0, ROWS)
    row_tokens = token + row // GROUP
    row_positions = past + row_tokens
    at = tl.arange(0, WIDTH)
    heads = (query_start + row_tokens).to(tl.int64) * Q_HEADS + kv_head * GROUP + row % GROUP
    inside = ((row_tokens <= last_token) & (row < TOKENS * GROUP))[:, None] & (at < HEAD_DIM)[None, :]
    q = meeting(tl.load(q_ptr + heads[:, None] * HEAD_DIM + at[None, :], mask=inside, other=0.0), k_cache_ptr)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + kv_head * GROUP + row % GROUP) * 1.4426950408889634  # LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)

    table_ptr = tables_ptr + seq.to(tl.int64) * table_width
    end = past + last_token + 1
    if WINDOWED:
        first = first_seen(past + token, window, CHUNKED)
        masked_from = first // TILE * TILE
    else:
        first = 0
        masked_from = (past + token + 1) // TILE * TILE  # before it, all rows see all keys
    row_ends = None
    if seen_ends_ptr is not None:
        row_ends = tl.load(seen_ends_ptr + query_start + row_tokens, mask=row_tokens <= last_token, other=0)
        row_ends = tl.maximum(row_ends, row_positions + 1)
        end = tl.maximum(end, tl.max(tl.where(row_tokens <= last_token, row_ends, 0)))
    row_masks = None
    if tree_mask_ptr is not None:
        row_masks = tl.load(tree_mask_ptr + query_start + row_tokens, mask=row_tokens <= last_token, other=-1)
        if not WINDOWED:  # positions further back than the mask's bits are visible
            masked_from = tl.maximum(past + token - LAST_BIT, 0) // TILE * TILE
    MASKED_STAGES: tl.constexpr = STAGES if WINDOWED else 2
    begin = first // TILE * TILE
    blocks = find_blocks(table_ptr, begin, end, BLOCK_SIZE, TILE)
    for start in tl.range(begin, masked_from, TILE, num_stages=STAGES):
        blocks, top, total, out = attend_tile(
            q, k_cache_ptr, v_cache_ptr, k_tiles, v_tiles, table_ptr, blocks, start, first, end, kv_head,
            row_positions, window, scale, top, total, out,
            KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, TILE, PRECISION, TMA, SOFTCAP, False,
        )  # fmt: skip
    for start in tl.range(masked_from, end, TILE, num_stages=MASKED_STAGES):
        blocks, top, total, out = attend_tile(
            q, k_cache_ptr, v_cache_ptr, k_tiles, v_tiles, table_ptr, blocks, start, first, end, kv_head,
            row_positions, window, scale, top, total, out,
            KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, TILE, PRECISION, TMA, SOFTCAP, True, CHUNKED, row_masks,
            row_ends,
        )  # fmt: skip
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + heads[:, None] * HEAD_DIM + at[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def chunk_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    chunked: bool = False,
    tree_mask: torch.Tensor | None = None,
    seen_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes paged_attention for any mixture of rows, [num_tokens, num_q_heads, head_dim]; sequences without rows are
    skipped. Lengths are not read on the host."""
    num_tokens, num_seqs, kv_heads, tuning = q.size(0), block_tables.size(0), k_cache.size(2), TUNING.here
    assert sliding_window or not chunked
    assert tree_mask is None or (tree_mask.dtype is torch.int64 and tree_mask.is_contiguous())
    assert seen_ends is None or (seen_ends.dtype is torch.int32 and seen_ends.is_contiguous())
    pages, constants = over_pages(q, k_cache, v_cache, block_tables)
    tokens = constants["ROWS"] // (q.size(1) // kv_heads)
    out = torch.empty_like(q)
    _chunk_attention[(kv_heads, num_tokens // tokens + num_seqs)](
        *pages,
        query_start,
        seq_lens,
        sinks,
        tree_mask,
        seen_ends,
        out,
        scale * LOG2_E,
        block_tables.stride(0),
        sliding_window,
        num_seqs,
        **constants,
        TOKENS=tokens,
        STAGES=tuning.stages,
        SOFTCAP=softcap,
        WINDOWED=sliding_window > 0,
        CHUNKED=chunked,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return out


def over_pages(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Returns the first arguments of a kernel with query tiles over a paged cache, and the constants derived from
    them."""
    assert q.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert block_tables.stride(1) == 1
    q_heads, (_, block_size, kv_heads, head_dim) = q.size(1), k_cache.shape
    tile = tile_keys(TUNING.here.keys, head_dim, k_cache.element_size())
    tma = takes_tma(k_cache, tile)
    tiles = (tiles_of(k_cache, tile), tiles_of(v_cache, tile)) if tma else (None, None)
    return (q, k_cache, v_cache, *tiles, block_tables), {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": padded_head_dim(head_dim),
        "BLOCK_SIZE": block_size,
        "ROWS": max(TUNING.here.rows, triton.next_power_of_2(q_heads // kv_heads)),
        "TILE": tile,
        "PRECISION": dot_precision(q.element_size()),
        "TMA": tma,
    }


def takes_tma(cache: torch.Tensor, tile: int) -> bool:
    """Returns whether the copy engine (TMA) can be used: it moves whole tiles of whole heads.

    Prefill on an H200: 503 TFLOP/s with it, 375 without.
    """
    block_size, head_dim = cache.size(1), cache.size(3)
    fits = block_size % tile == 0 and head_dim == padded_head_dim(head_dim) and cache.element_size() == 2
    return fits and cache.size(0) * block_size < 1 << 31


def tiles_of(cache: torch.Tensor, tile: int) -> TensorDescriptor:
    num_blocks, block_size, kv_heads, head_dim = cache.shape
    size = kv_heads * head_dim
    return TensorDescriptor(cache, [num_blocks * block_size, size], [size, 1], [tile, head_dim])


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's calls, with chunked windows if some layers have them."""
    if not shape.attends_in_pages:
        return
    rows = 100  # more rows than sequences
    step = *shape.caches(), ints(2, TABLE_WIDTH), ints(3), ints(2), shape.scale

    def attend(
        *, chunked: bool = False, tree_mask: torch.Tensor | None = None, seen_ends: torch.Tensor | None = None
    ) -> None:
        q, rest = shape.empty(rows, shape.num_q_heads, shape.head_dim), (shape.sinks(), shape.softcap, chunked)
        chunk_attention(q, *step, int(chunked), *rest, tree_mask, seen_ends)

    yield attend
    if shape.chunked_windows:
        yield lambda: attend(chunked=True)
    if shape.has_trees:
        yield lambda: attend(tree_mask=longs(rows))
    if shape.sees_ahead:
        yield lambda: attend(seen_ends=ints(rows))
