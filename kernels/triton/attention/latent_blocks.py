"""Latent attention over blocks (kernels/reference/attention/latent_attention.py): single rows and chunks.

Single rows are split along the keys. The rows of a tile are query heads, in a chunk those of some tokens: all of them
use the same vectors, so a tile of vectors is loaded once, as keys and as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.attention.attention_tile import (
    LOG2_E,
    MIN_DOT,
    accumulate,
    dot_precision,
    find_blocks,
    meeting,
    padded_head_dim,
)
from quire.kernels.triton.attention.chunk_attention import find_sequence
from quire.kernels.triton.attention.combine import combine
from quire.kernels.triton.precompile.shapes import TABLE_WIDTH, Calls, ModelShape, ints


@dataclass(frozen=True)
class LatentTile:
    """Tile sizes, chosen by shared memory (a Hopper has 227 KiB per program), not measured.

    Compare with `python -m tools.bench.kernels.gpu latent_tiles`.
    """

    keys: int  # positions
    stages: int
    warps: int


@dataclass(frozen=True)
class LatentTuning:
    """Tuning of latent attention."""

    rows: int  # of a chunk's tile; maximum for a single row's tile
    few: LatentTile  # for tiles of MIN_DOT rows
    many: LatentTile
    few_float32: LatentTile
    many_float32: LatentTile
    enough_programs: int  # programs that fill the GPU; with fewer, rows are split along the keys
    most_splits: int


# 64 rows are one warp group's matrix instruction. Of 576 16-bit elements a position takes 1,152 bytes, and so does a
# row: a program takes most of a processor's shared memory, so that there is one for each of an H200's 132.
TUNING = ByCapability(
    {
        SM90: LatentTuning(
            rows=64,
            few=LatentTile(32, 4, 4),
            many=LatentTile(32, 3, 8),
            few_float32=LatentTile(16, 2, 4),
            many_float32=LatentTile(16, 2, 8),
            enough_programs=132,
            most_splits=32,
        )
    }
)


def latent_tile(rows: int, element_bytes: int) -> LatentTile:
    """Returns the tile sizes for `rows` rows of queries per program and vectors of `element_bytes`."""
    few, tuning = rows <= MIN_DOT, TUNING.here
    if element_bytes == 4:
        return tuning.few_float32 if few else tuning.many_float32
    return tuning.few if few else tuning.many


@triton.jit
def load_elements(
    cache_ptr,
    blocks,
    start,
    end,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Loads [TILE, WIDTH]: elements FIRST to FIRST + SIZE of vectors at positions from `start` on, zeros from `end`
    on."""
    positions = start + tl.arange(0, TILE)
    at = tl.arange(0, WIDTH)
    places = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    inside = (positions < end)[:, None]
    if WIDTH != SIZE:
        inside = inside & (at < SIZE)[None, :]
    return tl.load(cache_ptr + places[:, None] * STRIDE + FIRST + at[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["table_width", "num_seqs", "num_splits", "token_stride"])
def _latent_attention(
    q_ptr,
    rotated_ptr,
    cache_ptr,
    tables_ptr,
    query_start_ptr,
    seq_lens_ptr,
    order_ptr,
    out_ptr,
    parts_ptr,
    logs_ptr,
    scale,
    table_width,
    num_seqs,
    num_splits,
    token_stride,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attends with GROUP of HEADS heads per program. DECODE: one row per sequence, else rows by query_start."""
    first_head = tl.program_id(0) * GROUP
    if DECODE:
        seq = tl.program_id(1)
        if order_ptr is not None:
            seq = tl.load(order_ptr + seq)
        query_start, num_tokens, token = seq, 1, 0
    else:
        tile = tl.num_programs(1) - 1 - tl.program_id(1)  # a prompt's last tiles read the most keys: start them first
        seq = find_sequence(query_start_ptr, tile, num_seqs, TOKENS)
        query_start = tl.load(query_start_ptr + seq)
        num_tokens = tl.load(query_start_ptr + seq + 1) - query_start
        token = (tile - (query_start // TOKENS + seq)) * TOKENS
        if token >= num_tokens:
            return
    past = tl.load(seq_lens_ptr + seq) - num_tokens
    last_token = tl.minimum(token + TOKENS, num_tokens) - 1
    begin, end = 0, past + last_token + 1
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end, TILE), num_splits) * TILE
        begin = tl.program_id(2) * share
        end = tl.minimum(begin + share, end)

    row = tl.arange(0, ROWS)
    row_tokens = token + row // GROUP
    row_positions = past + row_tokens
    at, at_rope = tl.arange(0, WIDTH), tl.arange(0, ROPE_WIDTH)
    row_token = (query_start + row_tokens).to(tl.int64)
    head = first_head + row % GROUP
    query = row_token * HEADS + head
    is_row = (row_tokens <= last_token) & (row < TOKENS * GROUP)
    inside = is_row[:, None] & (at < RANK)[None, :]
    q = meeting(tl.load(q_ptr + query[:, None] * RANK + at[None, :], mask=inside, other=0.0), cache_ptr)
    source = rotated_ptr + (row_token * token_stride + head * HEAD_STRIDE)[:, None] + at_rope[None, :]
    rotated = meeting(tl.load(source, mask=is_row[:, None] & (at_rope < ROPE)[None, :], other=0.0), cache_ptr)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)

    table_ptr = tables_ptr + seq.to(tl.int64) * table_width
    blocks = find_blocks(table_ptr, begin, end, BLOCK_SIZE, TILE)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        vectors = load_elements(cache_ptr, blocks, start, end, 0, RANK, WIDTH, RANK + ROPE, BLOCK_SIZE, TILE)
        keys = load_elements(cache_ptr, blocks, start, end, RANK, ROPE, ROPE_WIDTH, RANK + ROPE, BLOCK_SIZE, TILE)
        vectors, keys = vectors.to(q.dtype), keys.to(q.dtype)  # converts from 8 bits
        blocks = find_blocks(table_ptr, start + TILE, end, BLOCK_SIZE, TILE)
        scores = tl.dot(rotated, tl.trans(keys), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(vectors), scores, input_precision=PRECISION) * scale
        positions = start + tl.arange(0, TILE)
        seen = (positions[None, :] <= row_positions[:, None]) & (positions < end)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        top, total, out = accumulate(scores, vectors, top, total, out, PRECISION)

    found = total != 0.0  # NaN propagates
    out = out / tl.where(found, total, 1.0)[:, None]
    if SPLIT:
        part = query * num_splits + tl.program_id(2)
        logs = tl.where(found, top + tl.log2(tl.where(found, total, 1.0)), float("-inf"))
        tl.store(logs_ptr + part, logs, mask=is_row)
        tl.store(parts_ptr + part[:, None] * RANK + at[None, :], out, mask=inside & found[:, None])
    else:
        tl.store(out_ptr + query[:, None] * RANK + at[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def latent_attention(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Computes causal attention over cached latent vectors, [num_tokens, num_heads, rank]: split along the keys with
    one row per sequence, else in tiles of tokens."""
    if q.size(0) == block_tables.size(0):
        return latent_decode(q, q_rotated, cache, block_tables, seq_lens, scale)
    return latent_chunk(q, q_rotated, cache, block_tables, query_start, seq_lens, scale)


def latent_decode(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    order: torch.Tensor | None = None,
    *,
    tile: LatentTile | None = None,
) -> torch.Tensor:
    """Computes latent_attention with one row per sequence. Sequences of length 0 give zeros.

    order: int32 [num_seqs], sequences in the order in which they are started: longest first avoids stragglers.
    """
    num_seqs, num_heads, rank = q.shape
    group = group_of(num_heads)
    rows = max(triton.next_power_of_2(group), MIN_DOT)
    num_splits = splits_for(num_seqs, num_heads // group)
    out, parts, logs = torch.empty_like(q), None, None
    if num_splits > 1:
        parts = torch.empty((num_seqs * num_heads, num_splits, rank), dtype=torch.float32, device=q.device)
        logs = torch.empty(parts.shape[:2], dtype=torch.float32, device=q.device)
    where = q, q_rotated, cache, block_tables, None, seq_lens, order
    _launch(*where, out, parts, logs, scale, rows=rows, tokens=1, num_splits=num_splits, tile=tile)
    if parts is not None and logs is not None:
        combine(parts, logs, out.view(-1, rank))
    return out


def latent_chunk(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    tile: LatentTile | None = None,
) -> torch.Tensor:
    """Computes latent_attention for any mixture of rows; sequences without rows are skipped."""
    out, rows = torch.empty_like(q), TUNING.here.rows
    where = q, q_rotated, cache, block_tables, query_start, seq_lens, None
    tokens = rows // group_of(q.size(1))
    _launch(*where, out, None, None, scale, rows=rows, tokens=tokens, num_splits=1, tile=tile)
    return out


def _launch(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    order: torch.Tensor | None,
    out: torch.Tensor,
    parts: torch.Tensor | None,
    logs: torch.Tensor | None,
    scale: float,
    *,
    rows: int,
    tokens: int,
    num_splits: int,
    tile: LatentTile | None,
) -> None:
    """Launches the kernel for single rows (query_start None) or chunks; results go to `out`, or with several splits to
    `parts` and their log-sum-exps `logs`, which the caller combines. `rows`: query rows of a program, at
    least `tokens` times the heads of a group."""
    num_tokens, num_heads, rank = q.shape
    num_seqs, rope, group = block_tables.size(0), q_rotated.size(2), group_of(num_heads)
    assert q.is_contiguous()
    assert cache.is_contiguous()
    assert cache.size(3) == rank + rope
    assert q_rotated.stride(2) == block_tables.stride(1) == 1
    chosen = tile or latent_tile(rows, cache.element_size())
    tiles = num_seqs if query_start is None else num_tokens // tokens + num_seqs
    _latent_attention[(num_heads // group, tiles, num_splits)](
        q,
        q_rotated,
        cache,
        block_tables,
        query_start,
        seq_lens,
        order,
        out,
        parts,
        logs,
        scale * LOG2_E,
        block_tables.stride(0),
        num_seqs,
        num_splits,
        q_rotated.stride(0),
        HEAD_STRIDE=q_rotated.stride(1),
        HEADS=num_heads,
        GROUP=group,
        RANK=rank,
        ROPE=rope,
        WIDTH=padded_head_dim(rank),
        ROPE_WIDTH=padded_head_dim(rope),
        BLOCK_SIZE=cache.size(1),
        ROWS=rows,
        TOKENS=tokens,
        TILE=chosen.keys,
        STAGES=chosen.stages,
        PRECISION=dot_precision(q.element_size()),
        DECODE=query_start is None,
        SPLIT=parts is not None,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )


def group_of(num_heads: int) -> int:
    """Returns the heads of a tile, so that tiles have equal numbers of heads."""
    return next(size for size in range(min(num_heads, TUNING.here.rows), 0, -1) if num_heads % size == 0)


def splits_for(num_seqs: int, groups: int) -> int:
    """Returns the number of splits: a power of two independent of lengths, so that a CUDA graph can keep it."""
    wanted = triton.cdiv(TUNING.here.enough_programs, max(num_seqs * groups, 1))
    return min(1 << (wanted - 1).bit_length(), TUNING.here.most_splits)


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the calls of single rows and chunks for models with latent attention, except batch-invariantly."""
    if shape.latent is None or shape.batch_invariant:
        return
    heads, rank, rope, still = shape.num_q_heads, shape.latent.rank, shape.latent.rope, shape.latent.still
    cache, scale = shape.latent_cache(), 0.1

    def queries(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return shape.empty(rows, heads, rank), shape.empty(rows, heads, still + rope)[..., still:]

    def decode(rows: int, ordered: bool) -> None:
        order = ints(rows) if ordered else None
        latent_decode(*queries(rows), cache, ints(rows, TABLE_WIDTH), ints(rows), scale, order)

    yield lambda: latent_chunk(*queries(100), cache, ints(2, TABLE_WIDTH), ints(3), ints(2), scale)
    for rows in (shape.max_num_seqs, 8, 2):
        yield partial(decode, rows, True)
        yield partial(decode, rows, False)
