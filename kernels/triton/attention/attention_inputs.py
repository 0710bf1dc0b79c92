"""Splits the fused query-key-value product in one pass: queries for attention, keys and values to the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.attention.attention_tile import to_cache
from quire.kernels.triton.precompile.shapes import ROWS, Calls, ModelShape, ints


@dataclass(frozen=True)
class InputsTuning:
    """Heads per program and warps of the preparation of attention's inputs."""

    heads: int  # per program
    warps: int


# With 8 heads a program, 256 rows of 32 heads take 2.4 us on an H200 and 2048 rows 10.2; with one, 6.3 and 41.
TUNING = ByCapability({SM90: InputsTuning(heads=8, warps=4)})


@triton.jit
def _qk_norm_rope_store(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_ptr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Processes HEADS heads of one token: queries to `q`, keys and values to the caches."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    HALF: tl.constexpr = HEAD_DIM // 2
    at = tl.arange(0, HALF_WIDTH)[None, :]
    inside = at < HALF
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    exists = inside & (head < Q_HEADS + 2 * KV_HEADS)

    source = qkv_ptr + (token * (Q_HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + at
    left = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=exists, other=0.0).to(tl.float32)
    normed_left, normed_right = left, right
    if NORM:
        weights = tl.where(is_q, q_weight_ptr + at, k_weight_ptr + at)
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / HEAD_DIM + eps)[:, None]
        normed_left = left * scale * tl.load(weights, mask=exists, other=0.0).to(tl.float32)
        normed_right = right * scale * tl.load(weights + HALF, mask=exists, other=0.0).to(tl.float32)

    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM + at
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + HALF, mask=inside, other=0.0)
    dtype = q_ptr.dtype.element_ty
    left = tl.where(is_v, left, normed_left * cos - normed_right * sin).to(dtype)
    right = tl.where(is_v, right, normed_right * cos + normed_left * sin).to(dtype)

    place = tl.load(slot_mapping_ptr + token).to(tl.int64) * KV_HEADS
    to_q = q_ptr + (token * Q_HEADS + head) * HEAD_DIM + at
    to_k = k_cache_ptr + (place + head - Q_HEADS) * HEAD_DIM + at
    to_v = v_cache_ptr + (place + head - Q_HEADS - KV_HEADS) * HEAD_DIM + at
    tl.store(to_q, left, mask=exists & is_q)
    tl.store(to_q + HALF, right, mask=exists & is_q)
    left, right = to_cache(left, k_cache_ptr.dtype.element_ty), to_cache(right, k_cache_ptr.dtype.element_ty)
    tl.store(to_k, left, mask=exists & is_k)
    tl.store(to_k + HALF, right, mask=exists & is_k)
    tl.store(to_v, left, mask=exists & is_v)
    tl.store(to_v + HALF, right, mask=exists & is_v)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Normalizes and rotates queries and keys of contiguous `qkv`, stores keys and values in the caches, and returns
    the queries [num_tokens, num_q_heads, head_dim], in one launch."""
    assert qkv.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    rows, head_dim = qkv.size(0), k_cache.size(3)
    q = torch.empty((rows, num_q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    num_heads, tuning = num_q_heads + 2 * num_kv_heads, TUNING.here
    if rows:
        _qk_norm_rope_store[(rows, triton.cdiv(num_heads, tuning.heads))](
            qkv,
            q_weight,
            k_weight,
            eps,
            cos_sin,
            positions,
            slot_mapping,
            k_cache,
            v_cache,
            q,
            Q_HEADS=num_q_heads,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF_WIDTH=triton.next_power_of_2(head_dim // 2),
            HEADS=tuning.heads,
            NORM=q_weight is not None,
            num_warps=tuning.warps,
        )
    return q


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's call for models without latent attention."""
    if shape.latent is not None:
        return
    norm, places = shape.head_norm(), (ints(ROWS), ints(ROWS))
    rest = norm, norm, 1e-6, shape.cos_sin(), *places, *shape.caches(), shape.num_q_heads, shape.num_kv_heads
    yield lambda: qk_norm_rope_store(shape.empty(ROWS, shape.qkv_size), *rest)
