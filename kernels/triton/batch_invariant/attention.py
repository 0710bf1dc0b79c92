"""Attention whose sums are split by position, never by batch.

A row's keys are processed in tiles that start at multiples of the tile size, tiles in spans that start at multiples of
SPAN. A span has its own online softmax and is complete when it is joined to the previous ones. Few rows use a program
per span and a second kernel that joins them; many rows, and chunks, use one program that does both in turn: the same
operations on the same numbers in the same order. Keys that are not visible to a row have exactly zero weight, so it
does not matter which tiles and spans other rows add to its program.

Products and sums are never fused (enable_fp_fusion), because the compiler might fuse in one kernel and not in the
other.
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
    find_blocks,
    first_seen,
    meeting,
    merge,
    padded_head_dim,
)
from quire.kernels.triton.attention.chunk_attention import attend_tile, find_sequence, over_pages
from quire.kernels.triton.precompile.shapes import TABLE_WIDTH, Calls, ModelShape, ints

LONG_TABLE = 4096  # blocks of a sequence with several spans, for precompilation


@dataclass(frozen=True)
class InvariantAttentionTuning:
    """Tuning of batch-invariant attention; tiles are those of chunk_attention.py."""

    span: int  # positions, a multiple of every tile; not measured
    enough_programs: int  # programs that fill the GPU; with fewer, spans run in parallel (see decode_attention.py)
    stages: int
    warps: int
    joined_queries: int  # queries per program of the join kernel
    join_warps: int


TUNING = ByCapability(
    {SM90: InvariantAttentionTuning(span=1024, enough_programs=512, stages=3, warps=4, joined_queries=4, join_warps=4)}
)


@triton.jit(do_not_specialize=["table_width", "window", "num_seqs", "num_parts"])
def _attention(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_tiles,
    v_tiles,
    tables_ptr,
    query_start_ptr,
    seq_lens_ptr,
    order_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    logs_ptr,
    scale,
    table_width,
    window,
    num_seqs,
    num_parts,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Computes attention of up to TOKENS tokens for the query heads of one KV head, one span of SPAN keys after the
    other, merged in order. SPLIT: each program computes a single span and stores its part and log-sum-exp."""
    kv_head = tl.program_id(0)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
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
    past = tl.load(seq_lens_ptr + seq) - num_tokens  # -1 for padding rows
    last_token = tl.minimum(token + TOKENS, num_tokens) - 1
    end = past + last_token + 1
    first = tl.where(window > 0, first_seen(past + token, window, CHUNKED), 0)
    first_span, last_span = first // SPAN, tl.cdiv(end, SPAN)
    if SPLIT:
        first_span = tl.maximum(first_span, tl.program_id(2))
        last_span = tl.minimum(last_span, tl.program_id(2) + 1)

    row = tl.arange(0, ROWS)
    row_tokens = token + row // GROUP
    row_positions = past + row_tokens
    at = tl.arange(0, WIDTH)
    heads = (query_start + row_tokens).to(tl.int64) * Q_HEADS + kv_head * GROUP + row % GROUP
    is_row = (row_tokens <= last_token) & (row < TOKENS * GROUP)
    inside = is_row[:, None] & (at < HEAD_DIM)[None, :]
    q = meeting(tl.load(q_ptr + heads[:, None] * HEAD_DIM + at[None, :], mask=inside, other=0.0), k_cache_ptr)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_width

    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    all_out = tl.zeros([ROWS, WIDTH], tl.float32)
    if sinks_ptr is not None:  # applied where parts are joined
        all_top = tl.load(sinks_ptr + kv_head * GROUP + row % GROUP) * 1.4426950408889634  # LOG2_E
        all_total = tl.full([ROWS], 1.0, tl.float32)
    log = tl.full([ROWS], float("-inf"), tl.float32)
    for span in range(first_span, last_span):
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, WIDTH], tl.float32)
        begin = tl.maximum(span * SPAN, first // TILE * TILE)
        blocks = find_blocks(table_ptr, begin, end, BLOCK_SIZE, TILE)
        for start in tl.range(begin, tl.minimum(span * SPAN + SPAN, end), TILE, num_stages=STAGES):
            blocks, top, total, out = attend_tile(
                q, k_cache_ptr, v_cache_ptr, k_tiles, v_tiles, table_ptr, blocks, start, first, end, kv_head,
                row_positions, window, scale, top, total, out,
                KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, TILE, PRECISION, TMA, SOFTCAP, True, CHUNKED,
            )  # fmt: skip
        found = total != 0.0  # NaN propagates
        log = tl.where(found, top + tl.log2(tl.where(found, total, 1.0)), float("-inf"))
        out = out / tl.where(found, total, 1.0)[:, None]
        if SPLIT:
            all_out = out
        else:
            all_top, all_total, all_out = merge(log, out, all_top, all_total, all_out)
    if SPLIT:
        part = heads * num_parts + tl.program_id(2)
        tl.store(logs_ptr + part, log, mask=is_row)
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + at[None, :], all_out, mask=inside)
    else:
        all_out = all_out / tl.where(all_total == 0.0, 1.0, all_total)[:, None]
        to = out_ptr + heads[:, None] * HEAD_DIM + at[None, :]
        tl.store(to, all_out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_parts", "num_queries"])
def _join(
    parts_ptr,
    logs_ptr,
    sinks_ptr,
    out_ptr,
    num_parts,
    num_queries,
    Q_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Joins spans of some queries in order, by the same operations as the kernel with one program per row."""
    query = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    at = tl.arange(0, WIDTH)
    inside = (query < num_queries)[:, None] & (at < HEAD_DIM)[None, :]
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + query % Q_HEADS) * 1.4426950408889634  # LOG2_E
        total = tl.full([QUERIES], 1.0, tl.float32)
    for span in range(num_parts):
        part = query * num_parts + span
        log = tl.load(logs_ptr + part, mask=query < num_queries, other=float("-inf"))
        found = tl.load(parts_ptr + part[:, None] * HEAD_DIM + at[None, :], mask=inside, other=0.0)
        top, total, out = merge(log, found, top, total, out)
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out_ptr + query[:, None] * HEAD_DIM + at[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=inside)


def paged_attention(
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
) -> torch.Tensor:
    """Computes causal attention over blocks batch-invariantly, [num_tokens, num_q_heads, head_dim]: by decode_attention
    with one row per sequence, else by chunk_attention. Trees are not supported."""
    if q.size(0) == block_tables.size(0):
        return decode_attention(
            q, k_cache, v_cache, block_tables, seq_lens, scale, sliding_window, None, sinks, softcap, chunked
        )
    return chunk_attention(
        q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, sliding_window, sinks, softcap, chunked
    )


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int,
    order: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    chunked: bool = False,
) -> torch.Tensor:
    """Computes attention with one row per sequence, [num_seqs, num_q_heads, head_dim], batch-invariantly; few rows use
    a program per span. Arguments as in kernels/triton/attention/decode_attention.py."""
    num_seqs, width = block_tables.shape
    num_spans = triton.cdiv(width * k_cache.size(1), TUNING.here.span)
    splits = num_spans if num_seqs * k_cache.size(2) < TUNING.here.enough_programs else 1
    rows = q, k_cache, v_cache, block_tables, None, seq_lens, order
    return _attend(*rows, scale, sliding_window, splits, sinks, softcap, chunked)


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
) -> torch.Tensor:
    """Computes attention for any mixture of rows, [num_tokens, num_q_heads, head_dim], batch-invariantly. Arguments as
    in kernels/triton/attention/chunk_attention.py."""
    rows = q, k_cache, v_cache, block_tables, query_start, seq_lens, None
    return _attend(*rows, scale, sliding_window, 1, sinks, softcap, chunked)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    order: torch.Tensor | None,
    scale: float,
    sliding_window: int,
    num_splits: int,
    sinks: torch.Tensor | None,
    softcap: float,
    chunked: bool,
) -> torch.Tensor:
    """Launches the kernel; `query_start` None: one row per sequence, where sequences of length 0 give zeros."""
    (num_tokens, q_heads, head_dim), num_seqs, kv_heads = q.shape, block_tables.size(0), k_cache.size(2)
    assert sliding_window or not chunked
    tuning = TUNING.here
    pages, constants = over_pages(q, k_cache, v_cache, block_tables)
    assert tuning.span % constants["TILE"] == 0
    tokens = constants["ROWS"] // (q_heads // kv_heads)
    out = torch.empty_like(q)
    parts = logs = None
    if num_splits > 1:
        queries = num_tokens * q_heads
        parts = torch.empty((queries, num_splits, head_dim), dtype=torch.float32, device=q.device)
        logs = torch.empty((queries, num_splits), dtype=torch.float32, device=q.device)
    tiles = num_seqs if query_start is None else num_tokens // tokens + num_seqs
    _attention[(kv_heads, tiles, num_splits)](
        *pages,
        query_start,
        seq_lens,
        order,
        sinks,
        out,
        parts,
        logs,
        scale * LOG2_E,
        block_tables.stride(0),
        sliding_window,
        num_seqs,
        num_splits,
        **constants,
        TOKENS=tokens,
        SPAN=tuning.span,
        STAGES=tuning.stages,
        SOFTCAP=softcap,
        DECODE=query_start is None,
        SPLIT=parts is not None,
        CHUNKED=chunked,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        enable_fp_fusion=False,
    )
    if parts is not None:
        _join_parts(parts, logs, sinks, out)
    return out


def _join_parts(parts: torch.Tensor, logs: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
    """Combines the partial outputs of spans, in order, into `out` [num_tokens, num_q_heads, head_dim].

    `parts`: float32 [num_queries, num_parts, head_dim], normalized; `logs`: float32 [num_queries, num_parts], their
    log-sum-exps to base 2; `sinks`: logits of attention sinks by head, or None.
    """
    num_queries, num_parts, head_dim = parts.shape
    queries = TUNING.here.joined_queries
    _join[(triton.cdiv(num_queries, queries),)](
        parts,
        logs,
        sinks,
        out,
        num_parts,
        num_queries,
        Q_HEADS=out.size(1),
        QUERIES=queries,
        HEAD_DIM=head_dim,
        WIDTH=padded_head_dim(head_dim),
        num_warps=TUNING.here.join_warps,
        enable_fp_fusion=False,
    )


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's calls, with chunked windows if some layers have them."""
    if not shape.batch_invariant:
        return

    def chunk(chunked: bool) -> None:
        step = *shape.caches(), ints(2, TABLE_WIDTH), ints(3), ints(2), shape.scale, int(chunked)
        chunk_attention(
            shape.empty(100, shape.num_q_heads, shape.head_dim), *step, shape.sinks(), shape.softcap, chunked
        )

    def decode(rows: int, ordered: bool, chunked: bool) -> None:
        step = *shape.caches(), ints(rows, LONG_TABLE), ints(rows), shape.scale, int(chunked)
        order = ints(rows) if ordered else None
        q = shape.empty(rows, shape.num_q_heads, shape.head_dim)
        decode_attention(q, *step, order, shape.sinks(), shape.softcap, chunked)

    for chunked in (True, False) if shape.chunked_windows else (False,):
        yield partial(chunk, chunked)
        for rows in (2, shape.max_num_seqs):
            yield partial(decode, rows, True, chunked)
            yield partial(decode, rows, False, chunked)
