"""Attention of one row per sequence directly from the query-key-value product: norm, rotation, store and attention.

For decoding a single sequence: one kernel and its combine instead of four that wait for each other. Keys and values of
earlier steps are loaded before the product is ready (pdl.py); the row's own never leave the registers. The rest is
decode_attention with the finest split.
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
    find_blocks,
    load_tile,
    meeting,
    to_cache,
)
from quire.kernels.triton.attention.combine import combine
from quire.kernels.triton.pdl import HAS_PDL, launch_dependents, wait_for_inputs
from quire.kernels.triton.precompile.shapes import TABLE_WIDTH, Calls, ModelShape, ints


@dataclass(frozen=True)
class RowAttentionTuning:
    """Splits, keys at a time and warps of a row's attention."""

    splits: int  # splits of a row's keys
    keys: int  # positions of a tile
    warps: int


# 16 splits are 128 programs with 8 kv heads: one tile each up to 1024 positions.
TUNING = ByCapability({SM90: RowAttentionTuning(splits=16, keys=64, warps=4)})


@triton.jit
def _normed(left, right, weight_left, weight_right, eps, HEAD_DIM: tl.constexpr):
    """Normalizes heads given in halves, [heads, HEAD_DIM / 2] each."""
    scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / HEAD_DIM + eps)[:, None]
    return left * scale * weight_left[None, :], right * scale * weight_right[None, :]


@triton.jit(do_not_specialize=["eps", "scale", "table_width", "window", "num_splits"])
def _row_attention(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    cos_sin_ptr,
    slot_mapping_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    seq_lens_ptr,
    parts_ptr,
    logs_ptr,
    scale,
    table_width,
    window,
    num_splits,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attends with the query heads of one kv head in one split; the first split includes and stores the row's own key
    and value."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    if PDL:
        launch_dependents()
    past = tl.load(seq_lens_ptr + row) - 1  # positions in the cache; -1: no sequence
    first = tl.where(window > 0, tl.maximum(past + 1 - window, 0), 0)
    tiles = tl.cdiv(past - first // TILE * TILE, TILE)
    share = tl.cdiv(tiles, num_splits)
    begin = first // TILE * TILE + split * share * TILE
    end = tl.minimum(begin + share * TILE, past)
    table_ptr = tables_ptr + row.to(tl.int64) * table_width
    half = tl.arange(0, HALF)
    at = tl.arange(0, HEAD_DIM)
    blocks = find_blocks(table_ptr, begin, end, BLOCK_SIZE, TILE)
    k_left = load_tile(k_cache_ptr, blocks, begin, first, end, kv_head, KV_HEADS, HEAD_DIM, HALF, BLOCK_SIZE, TILE)
    k_right = load_tile(
        k_cache_ptr + HALF, blocks, begin, first, end, kv_head, KV_HEADS, HEAD_DIM, HALF, BLOCK_SIZE, TILE
    )
    v = load_tile(v_cache_ptr, blocks, begin, first, end, kv_head, KV_HEADS, HEAD_DIM, HEAD_DIM, BLOCK_SIZE, TILE)
    blocks = find_blocks(table_ptr, begin + TILE, end, BLOCK_SIZE, TILE)
    angles = cos_sin_ptr + tl.maximum(past, 0).to(tl.int64) * HEAD_DIM + half
    cos = tl.load(angles)[None, :]
    sin = tl.load(angles + HALF)[None, :]
    if NORM:
        q_weight_left = tl.load(q_weight_ptr + half).to(tl.float32)
        q_weight_right = tl.load(q_weight_ptr + HALF + half).to(tl.float32)
        k_weight_left = tl.load(k_weight_ptr + half).to(tl.float32)
        k_weight_right = tl.load(k_weight_ptr + HALF + half).to(tl.float32)
    if PDL:
        wait_for_inputs()

    dtype = qkv_ptr.dtype.element_ty
    qkv_ptr += row.to(tl.int64) * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    member = tl.arange(0, GROUP_WIDTH)
    real = member < GROUP
    heads = kv_head * GROUP + member
    source = qkv_ptr + heads[:, None] * HEAD_DIM + half[None, :]
    left = tl.load(source, mask=real[:, None], other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=real[:, None], other=0.0).to(tl.float32)
    if NORM:
        left, right = _normed(left, right, q_weight_left, q_weight_right, eps, HEAD_DIM)
    q_left = (left * cos - right * sin).to(dtype)
    q_right = (right * cos + left * sin).to(dtype)

    wide_left, wide_right = meeting(q_left, k_cache_ptr), meeting(q_right, k_cache_ptr)
    top = tl.full([GROUP_WIDTH], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_WIDTH], tl.float32)
    out = tl.zeros([GROUP_WIDTH, HEAD_DIM], tl.float32)
    if split == 0:  # the row's own key and value
        own = qkv_ptr + (Q_HEADS + kv_head) * HEAD_DIM + half[None, :]
        own_left = tl.load(own).to(tl.float32)
        own_right = tl.load(own + HALF).to(tl.float32)
        if NORM:
            own_left, own_right = _normed(own_left, own_right, k_weight_left, k_weight_right, eps, HEAD_DIM)
        stored: tl.constexpr = k_cache_ptr.dtype.element_ty
        key_left = to_cache((own_left * cos - own_right * sin).to(dtype), stored)
        key_right = to_cache((own_right * cos + own_left * sin).to(dtype), stored)
        own_v = to_cache(tl.load(qkv_ptr + (Q_HEADS + KV_HEADS + kv_head) * HEAD_DIM + at), stored)
        place = (tl.load(slot_mapping_ptr + row).to(tl.int64) * KV_HEADS + kv_head) * HEAD_DIM
        tl.store(k_cache_ptr + place + half[None, :], key_left)
        tl.store(k_cache_ptr + place + HALF + half[None, :], key_right)
        tl.store(v_cache_ptr + place + at, own_v)
        products = q_left.to(tl.float32) * key_left.to(tl.float32) + q_right.to(tl.float32) * key_right.to(tl.float32)
        top = tl.sum(products, 1) * scale
        total = tl.full([GROUP_WIDTH], 1.0, tl.float32)
        out += own_v.to(tl.float32)[None, :]

    for start in tl.range(begin, end, TILE):
        k_left, k_right, v = k_left.to(wide_left.dtype), k_right.to(wide_left.dtype), v.to(wide_left.dtype)
        scores = tl.dot(wide_left, tl.trans(k_left), input_precision=PRECISION)
        scores = tl.dot(wide_right, tl.trans(k_right), scores, input_precision=PRECISION) * scale
        positions = start + tl.arange(0, TILE)
        scores = tl.where(((positions >= first) & (positions < end))[None, :], scores, float("-inf"))
        top, total, out = accumulate(scores, v, top, total, out, PRECISION)
        ahead = start + TILE
        k_left = load_tile(k_cache_ptr, blocks, ahead, first, end, kv_head, KV_HEADS, HEAD_DIM, HALF, BLOCK_SIZE, TILE)
        k_right = load_tile(
            k_cache_ptr + HALF, blocks, ahead, first, end, kv_head, KV_HEADS, HEAD_DIM, HALF, BLOCK_SIZE, TILE
        )
        v = load_tile(v_cache_ptr, blocks, ahead, first, end, kv_head, KV_HEADS, HEAD_DIM, HEAD_DIM, BLOCK_SIZE, TILE)
        blocks = find_blocks(table_ptr, ahead + TILE, end, BLOCK_SIZE, TILE)

    found = total != 0.0  # NaN propagates
    part = (row.to(tl.int64) * Q_HEADS + heads) * num_splits + split
    logs = tl.where(found, top + tl.log2(tl.where(found, total, 1.0)), float("-inf"))
    tl.store(logs_ptr + part, logs, mask=real)
    out = out / tl.where(found, total, 1.0)[:, None]
    tl.store(parts_ptr + part[:, None] * HEAD_DIM + at[None, :], out, mask=(real & found)[:, None])


def row_attention(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    num_q_heads: int,
    scale: float,
    sliding_window: int,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Computes qk_norm_rope_store and paged_attention of rows at position seq_lens - 1, [num_seqs, num_q_heads *
    head_dim]."""
    num_seqs, (_, block_size, kv_heads, head_dim) = qkv.size(0), k_cache.shape
    queries, tuning = num_seqs * num_q_heads, TUNING.here
    parts = torch.empty((queries, tuning.splits, head_dim), dtype=torch.float32, device=qkv.device)
    logs = torch.empty((queries, tuning.splits), dtype=torch.float32, device=qkv.device)
    out = torch.empty((num_seqs, num_q_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    launch = {"launch_pdl": True} if pdl else {}
    _row_attention[(kv_heads, tuning.splits, num_seqs)](
        qkv,
        q_weight,
        k_weight,
        eps,
        cos_sin,
        slot_mapping,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        parts,
        logs,
        scale * LOG2_E,
        block_tables.stride(0),
        sliding_window,
        tuning.splits,
        Q_HEADS=num_q_heads,
        KV_HEADS=kv_heads,
        GROUP_WIDTH=max(triton.next_power_of_2(num_q_heads // kv_heads), MIN_DOT),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=tuning.keys,
        PRECISION=dot_precision(qkv.element_size()),
        NORM=q_weight is not None,
        PDL=pdl,
        num_warps=tuning.warps,
        **launch,
    )
    combine(parts, logs, out.view(queries, head_dim), pdl=pdl)
    return out


def row_attention_takes(head_dim: int) -> bool:
    """Returns whether both halves of a head can be operands of matrix instructions."""
    return head_dim >= 2 * MIN_DOT and head_dim == triton.next_power_of_2(head_dim)


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's call for models that run single rows."""
    if not shape.single_row or not shape.attends_in_pages:
        return
    norm, qkv, table = shape.head_norm(), shape.empty(1, shape.qkv_size), (ints(1, TABLE_WIDTH), ints(1))
    step = norm, norm, 1e-6, shape.cos_sin(), ints(1), *shape.caches(), *table, shape.num_q_heads, shape.scale, 0
    yield lambda: row_attention(qkv, *step, pdl=HAS_PDL.here)
