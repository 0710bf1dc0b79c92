"""Decode attention of sequences with a common block prefix: its blocks are read once for many rows.

A tile is the query heads of one kv head for some rows of a group, so keys and values of the prefix are multiplied with
a matrix of queries, as in a prompt; the rest of each row is computed separately (decode_attention) and combined
(cascade inference, flashinfer.ai/2024/02/02/cascade-inference.html). 256 rows after 2,048 positions of 8 kv heads of
128 16-bit elements read 2.1 GB less a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.attention.attention_tile import LOG2_E, find_blocks, meeting
from quire.kernels.triton.attention.chunk_attention import TUNING as CHUNKS
from quire.kernels.triton.attention.chunk_attention import attend_tile, over_pages
from quire.kernels.triton.attention.combine import combine
from quire.kernels.triton.attention.decode_attention import MOST_OTHER_PARTS, PartialResults, attend_rest, splits_for
from quire.kernels.triton.precompile.shapes import TABLE_WIDTH, Calls, ModelShape, ints


@dataclass(frozen=True)
class PrefixTuning:
    """Tuning of shared prefixes; tiles are those of chunk_attention.py."""

    enough_programs: int  # programs that fill the GPU; with fewer, prefixes are split
    stages: int
    warps: int


# Two programs on each of an H200's 132 multiprocessors, as their shared memory allows.
TUNING = ByCapability({SM90: PrefixTuning(enough_programs=256, stages=3, warps=4)})


@dataclass(frozen=True)
class SharedPrefixes:
    """Rows grouped by common prefixes of their block tables. All int32; a tile belongs to one group, a group may have
    many."""

    members: torch.Tensor  # [num_tiles, rows_per_tile()] rows; -1: none
    tables: torch.Tensor  # [num_tiles] a row that starts with the blocks
    lens: torch.Tensor  # [num_tiles] positions in those blocks; 0: unused tile
    starts: torch.Tensor  # [num_seqs] shared positions of each row; 0: in no group


def rows_per_tile(num_q_heads: int, num_kv_heads: int) -> int:
    """Returns how many sequences of a group fit into a tile, at least 1."""
    return max(CHUNKS.here.rows // (num_q_heads // num_kv_heads), 1)


@triton.jit(do_not_specialize=["table_width", "num_splits", "part_stride", "first_part"])
def _shared_prefix(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_tiles,
    v_tiles,
    tables_ptr,
    members_ptr,
    tile_tables_ptr,
    tile_lens_ptr,
    parts_ptr,
    logs_ptr,
    scale,
    table_width,
    num_splits,
    part_stride,
    first_part,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Attends with the rows of a tile in one split of their common prefix."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    length = tl.load(tile_lens_ptr + tile)
    if length == 0:
        return
    share = tl.cdiv(tl.cdiv(length, TILE), num_splits) * TILE
    begin = split * share
    end = tl.minimum(begin + share, length)
    table_ptr = tables_ptr + tl.load(tile_tables_ptr + tile).to(tl.int64) * table_width

    row = tl.arange(0, ROWS)
    member = tl.load(members_ptr + tile * MEMBERS + row // GROUP, mask=row < MEMBERS * GROUP, other=-1)
    at = tl.arange(0, WIDTH)
    heads = member.to(tl.int64) * Q_HEADS + kv_head * GROUP + row % GROUP
    inside = (member >= 0)[:, None] & (at < HEAD_DIM)[None, :]
    q = meeting(tl.load(q_ptr + heads[:, None] * HEAD_DIM + at[None, :], mask=inside, other=0.0), k_cache_ptr)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    last = tl.zeros([ROWS], tl.int32) + end - 1
    blocks = find_blocks(table_ptr, begin, end, BLOCK_SIZE, TILE)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        blocks, top, total, out = attend_tile(
            q, k_cache_ptr, v_cache_ptr, k_tiles, v_tiles, table_ptr, blocks, start, 0, end, kv_head,
            last, 0, scale, top, total, out,
            KV_HEADS, HEAD_DIM, WIDTH, BLOCK_SIZE, TILE, PRECISION, TMA, 0.0, BLOCK_SIZE % TILE != 0,
        )  # fmt: skip
    found = total != 0.0  # NaN propagates
    part = heads * part_stride + first_part + split
    logs = tl.where(found, top + tl.log2(tl.where(found, total, 1.0)), float("-inf"))
    tl.store(logs_ptr + part, logs, mask=member >= 0)
    out = out / tl.where(found, total, 1.0)[:, None]
    tl.store(parts_ptr + part[:, None] * HEAD_DIM + at[None, :], out, mask=inside & found[:, None])


def shared_prefix_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    prefixes: SharedPrefixes,
    scale: float,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes decode_attention without a window for rows with shared `prefixes`, reading these once for many rows:
    [num_seqs, num_q_heads, head_dim]."""
    num_tiles, kv_heads = prefixes.members.size(0), k_cache.size(2)
    prefix_splits = _prefix_splits(num_tiles, kv_heads)
    own_splits = splits_for(q.size(0), kv_heads)
    out = torch.empty_like(q)
    merge = own_splits == 1  # enough programs: each merges the parts of its prefix
    parts = PartialResults.empty(q, prefix_splits + (0 if merge else own_splits))
    first_part = 0 if merge else own_splits
    rest = block_tables, seq_lens, prefixes.starts, order, scale, 0, own_splits, out, parts
    _attend_prefixes(q, k_cache, v_cache, block_tables, prefixes, scale, prefix_splits, parts, first_part)
    attend_rest(q, k_cache, v_cache, *rest, merge=merge)
    if not merge:
        combine(parts.outputs, parts.logs, out.view(-1, q.size(2)))
    return out


def _attend_prefixes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    prefixes: SharedPrefixes,
    scale: float,
    num_splits: int,
    parts: PartialResults,
    first_part: int,
) -> None:
    """Launches attention over the prefixes; results go to `parts` from index `first_part` on, `num_splits` per
    query."""
    (num_tiles, members), tuning = prefixes.members.shape, TUNING.here
    pages, constants = over_pages(q, k_cache, v_cache, block_tables)
    _shared_prefix[(k_cache.size(2), num_splits, num_tiles)](
        *pages,
        prefixes.members,
        prefixes.tables,
        prefixes.lens,
        parts.outputs,
        parts.logs,
        scale * LOG2_E,
        block_tables.stride(0),
        num_splits,
        parts.logs.size(1),
        first_part,
        **constants,
        MEMBERS=members,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def _prefix_splits(num_tiles: int, kv_heads: int) -> int:
    """Returns the number of splits, a power of two."""
    wanted = triton.cdiv(TUNING.here.enough_programs, num_tiles * kv_heads)
    return min(1 << (wanted - 1).bit_length(), MOST_OTHER_PARTS)


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's calls for models that attend in pages."""
    if not shape.attends_in_pages:
        return

    def attend(rows: int) -> None:
        members = ints(4, rows_per_tile(shape.num_q_heads, shape.num_kv_heads))
        prefixes = SharedPrefixes(members, ints(4), ints(4), ints(rows))
        q = shape.empty(rows, shape.num_q_heads, shape.head_dim)
        step = *shape.caches(), ints(rows, TABLE_WIDTH), ints(rows), prefixes, shape.scale, ints(rows)
        shared_prefix_attention(q, *step)

    for rows in (shape.max_num_seqs, 8):
        yield partial(attend, rows)
