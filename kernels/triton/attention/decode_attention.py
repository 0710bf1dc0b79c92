"""Attention of one row per sequence over its blocks: split along the keys, with the query heads of a kv head
together."""

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
    first_seen,
    load_tile,
    meeting,
    merge,
    padded_head_dim,
    soft_cap,
    tile_keys,
)
from quire.kernels.triton.attention.combine import combine
from quire.kernels.triton.precompile.shapes import TABLE_WIDTH, Calls, ModelShape, ints

MOST_OTHER_PARTS = 16


@dataclass(frozen=True)
class DecodeTuning:
    """Tuning of attention of single rows."""

    keys: int  # positions of a tile with 128 16-bit elements; fewer with larger ones
    short_keys: int  # the same for rows after a shared prefix
    stages: int  # buffers for tiles of keys and values
    warps: int
    enough_programs: int  # programs that fill the GPU; with fewer, sequences are split
    most_splits: int


# On an H200 (132 processors, 8 kv heads): 64 positions of 128 elements in 3 buffers are 96 KiB of keys and values, the
# fastest of those tried; wider heads take fewer positions for the same memory. The rest after a shared prefix is about
# 100 positions, for which half-size tiles are faster (52 us for 63 at 256 rows). 16-32 splits are fastest for 1
# sequence, 8 for 4, 4 for 8, 2 for 16, none from 64 on; ragged batches need twice as many (154 us for 167 at 32).
TUNING = ByCapability(
    {SM90: DecodeTuning(keys=64, short_keys=32, stages=3, warps=4, enough_programs=512, most_splits=32)}
)


@triton.jit(do_not_specialize=["table_width", "window", "num_splits", "part_stride"])
def _decode_attention(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    seq_lens_ptr,
    starts_ptr,
    order_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    logs_ptr,
    scale,
    table_width,
    window,
    num_splits,
    part_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DIRECT: tl.constexpr,
    OTHER_PARTS: tl.constexpr,
    MERGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Attends with the query heads of one kv head in one split of a sequence's keys."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    if order_ptr is not None:
        row = tl.load(order_ptr + row)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    seq_len = tl.load(seq_lens_ptr + row)
    first = tl.where(window > 0, first_seen(seq_len - 1, window, CHUNKED), 0)
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row)
        first = tl.maximum(first, start)
    tiles = tl.cdiv(seq_len - first // TILE * TILE, TILE)
    share = tl.cdiv(tiles, num_splits)
    begin = first // TILE * TILE + split * share * TILE
    end = tl.minimum(begin + share * TILE, seq_len)

    table_ptr = tables_ptr + row.to(tl.int64) * table_width
    blocks = find_blocks(table_ptr, begin, end, BLOCK_SIZE, TILE)
    member = tl.arange(0, GROUP_WIDTH)
    at = tl.arange(0, WIDTH)
    heads = row.to(tl.int64) * Q_HEADS + kv_head * GROUP + member
    inside = (member < GROUP)[:, None] & (at < HEAD_DIM)[None, :]
    q = meeting(tl.load(q_ptr + heads[:, None] * HEAD_DIM + at[None, :], mask=inside, other=0.0), k_cache_ptr)
    top = tl.full([GROUP_WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_WIDTH], tl.float32)
    out = tl.zeros([GROUP_WIDTH, WIDTH], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
        if split == 0:
            sink = tl.load(sinks_ptr + kv_head * GROUP + member, mask=member < GROUP, other=0.0)
            top, total = sink * 1.4426950408889634, tl.full([GROUP_WIDTH], 1.0, tl.float32)  # LOG2_E
    if MERGE:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
        if start > 0:
            for other in range(part_stride):
                part = heads * part_stride + other
                log = tl.load(logs_ptr + part, mask=member < GROUP, other=float("-inf"))
                wanted = inside & (log > float("-inf"))[:, None]  # empty parts were never written
                found = tl.load(parts_ptr + part[:, None] * HEAD_DIM + at[None, :], mask=wanted, other=0.0)
                top, total, out = merge(log, found, top, total, out)
    for at_key in tl.range(begin, end, TILE, num_stages=STAGES):
        k = load_tile(k_cache_ptr, blocks, at_key, first, end, kv_head, KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, TILE)
        v = load_tile(v_cache_ptr, blocks, at_key, first, end, kv_head, KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, TILE)
        k, v = k.to(q.dtype), v.to(q.dtype)  # converts from 8 bits
        blocks = find_blocks(table_ptr, at_key + TILE, end, BLOCK_SIZE, TILE)
        positions = at_key + tl.arange(0, TILE)
        scores = soft_cap(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, SOFTCAP)
        scores = tl.where(((positions >= first) & (positions < end))[None, :], scores, float("-inf"))
        top, total, out = accumulate(scores, v, top, total, out, PRECISION)

    found = total != 0.0  # NaN propagates
    out = out / tl.where(found, total, 1.0)[:, None]
    if DIRECT:
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + at[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        part = heads * part_stride + split
        logs = tl.where(found, top + tl.log2(tl.where(found, total, 1.0)), float("-inf"))
        tl.store(logs_ptr + part, logs, mask=member < GROUP)
        if starts_ptr is not None:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
            if (split == 0) & (start == 0):  # mark unused split slots as empty (-inf)
                other = (num_splits + tl.arange(0, OTHER_PARTS))[None, :]
                nothing = tl.full([GROUP_WIDTH, OTHER_PARTS], float("-inf"), tl.float32)
                wanted = (member < GROUP)[:, None] & (other < part_stride)
                tl.store(logs_ptr + (heads * part_stride)[:, None] + other, nothing, mask=wanted)
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + at[None, :], out, mask=inside & found[:, None])


@dataclass(frozen=True)
class PartialResults:
    """Partial results of a step's queries, to be combined."""

    outputs: torch.Tensor  # float32 [num_queries, num_parts, head_dim]
    logs: torch.Tensor  # float32 [num_queries, num_parts], base 2

    @classmethod
    def empty(cls, q: torch.Tensor, num_parts: int) -> PartialResults:
        queries = q.size(0) * q.size(1)
        outputs = torch.empty((queries, num_parts, q.size(2)), dtype=torch.float32, device=q.device)
        return cls(outputs, torch.empty((queries, num_parts), dtype=torch.float32, device=q.device))


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
    """Computes paged_attention with one row per sequence. Sequences of length 0 give zeros.

    order: int32 [num_seqs], sequences in the order in which they are started: longest first avoids stragglers.
    """
    num_splits = splits_for(q.size(0), k_cache.size(2))
    out = torch.empty_like(q)
    parts = PartialResults.empty(q, num_splits) if num_splits > 1 else None
    rest = block_tables, seq_lens, None, order, scale, sliding_window, num_splits, out, parts
    attend_rest(q, k_cache, v_cache, *rest, sinks=sinks, softcap=softcap, chunked=chunked)
    if parts is not None:
        combine(parts.outputs, parts.logs, out.view(-1, q.size(2)))
    return out


def attend_rest(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor | None,
    order: torch.Tensor | None,
    scale: float,
    sliding_window: int,
    num_splits: int,
    out: torch.Tensor,
    parts: PartialResults | None,
    *,
    merge: bool = False,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    chunked: bool = False,
) -> None:
    """Attends over each row's positions from `starts` (int32 [num_seqs]; None: 0) on.

    Writes to `out`, or to the first `num_splits` parts of each query. With starts, the other parts (up to
    MOST_OTHER_PARTS) belong to the positions before them, and are marked empty if there are none.

    merge: `parts` hold the results before the starts, for rows that start after 0; the merged result goes to `out`.
    """
    num_seqs, q_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.size(1), k_cache.size(2)
    assert q.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert block_tables.stride(1) == 1
    assert sliding_window or not chunked
    assert num_splits == 1 or (parts is not None and not merge)
    tuning = TUNING.here
    keys = tuning.keys if starts is None else tuning.short_keys
    _decode_attention[(kv_heads, num_splits, num_seqs)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        starts,
        order,
        sinks,
        out,
        None if parts is None else parts.outputs,
        None if parts is None else parts.logs,
        scale * LOG2_E,
        block_tables.stride(0),
        sliding_window,
        num_splits,
        1 if parts is None else parts.logs.size(1),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        GROUP_WIDTH=max(triton.next_power_of_2(q_heads // kv_heads), MIN_DOT),
        HEAD_DIM=head_dim,
        WIDTH=padded_head_dim(head_dim),
        BLOCK_SIZE=block_size,
        TILE=tile_keys(keys, head_dim, k_cache.element_size()),
        STAGES=tuning.stages,
        PRECISION=dot_precision(q.element_size()),
        DIRECT=parts is None or merge,
        OTHER_PARTS=MOST_OTHER_PARTS,
        MERGE=merge,
        SOFTCAP=softcap,
        CHUNKED=chunked,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def splits_for(num_seqs: int, kv_heads: int) -> int:
    """Returns the number of splits: a power of two independent of lengths, so that a CUDA graph can keep it."""
    wanted = triton.cdiv(TUNING.here.enough_programs, max(num_seqs * kv_heads, 1))
    return min(1 << (wanted - 1).bit_length(), TUNING.here.most_splits)


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's calls, with chunked windows if some layers have them."""
    if not shape.attends_in_pages:
        return

    def attend(rows: int, ordered: bool, chunked: bool) -> None:
        step = *shape.caches(), ints(rows, TABLE_WIDTH), ints(rows), shape.scale, int(chunked)
        order = ints(rows) if ordered else None
        q = shape.empty(rows, shape.num_q_heads, shape.head_dim)
        decode_attention(q, *step, order, shape.sinks(), shape.softcap, chunked)

    many = shape.max_num_seqs
    for chunked in (True, False) if shape.chunked_windows else (False,):
        for rows, ordered in ((many, True), (8, True), (many, False), (2, False)):
            yield partial(attend, rows, ordered, chunked)
