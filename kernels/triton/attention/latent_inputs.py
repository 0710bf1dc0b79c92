"""Stores compressed vectors in the cache and rotates queries and keys, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.attention.attention_tile import to_cache
from quire.kernels.triton.precompile.shapes import ROWS, TABLE_WIDTH, Calls, ModelShape, floats, ints


@dataclass(frozen=True)
class LatentInputsTuning:
    """Heads per program and warps of the rotation of queries."""

    heads: int  # query heads rotated per program
    warps: int


TUNING = ByCapability({SM90: LatentInputsTuning(heads=16, warps=4)})


@triton.jit
def _latent_store(
    q_ptr,
    latent_ptr,
    weight_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    cache_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Stores a token's vector in program 0; the others rotate HEADS of its queries each."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = ROPE // 2
    at = tl.arange(0, HALF_WIDTH)
    in_half = at < HALF
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROPE + at
    cos = tl.load(angles, mask=in_half, other=0.0)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)
    if tl.program_id(1) == 0:
        source = latent_ptr + token * (RANK + ROPE)
        place = cache_ptr + tl.load(slot_mapping_ptr + token).to(tl.int64) * (RANK + ROPE)
        of = tl.arange(0, WIDTH)
        inside = of < RANK
        vector = tl.load(source + of, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(vector * vector, 0) / RANK + eps)
        dtype = q_ptr.dtype.element_ty
        weight = tl.load(weight_ptr + of, mask=inside, other=0.0).to(tl.float32)
        normed = ((vector * scale).to(dtype).to(tl.float32) * weight).to(dtype)
        tl.store(place + of, to_cache(normed, cache_ptr.dtype.element_ty), mask=inside)
        left = tl.load(source + RANK + at, mask=in_half, other=0.0).to(tl.float32)
        right = tl.load(source + RANK + HALF + at, mask=in_half, other=0.0).to(tl.float32)
        turned_left, turned_right = (left * cos - right * sin).to(dtype), (right * cos + left * sin).to(dtype)
        tl.store(place + RANK + at, to_cache(turned_left, cache_ptr.dtype.element_ty), mask=in_half)
        tl.store(place + RANK + HALF + at, to_cache(turned_right, cache_ptr.dtype.element_ty), mask=in_half)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        tails = q_ptr + ((token * NUM_HEADS + head + 1) * HEAD_DIM - ROPE)[:, None] + at[None, :]
        exists = (head < NUM_HEADS)[:, None] & in_half[None, :]
        lefts = tl.load(tails, mask=exists, other=0.0).to(tl.float32)
        rights = tl.load(tails + HALF, mask=exists, other=0.0).to(tl.float32)
        tl.store(tails, (lefts * cos[None, :] - rights * sin[None, :]).to(q_ptr.dtype.element_ty), mask=exists)
        tl.store(tails + HALF, (rights * cos[None, :] + lefts * sin[None, :]).to(q_ptr.dtype.element_ty), mask=exists)


def latent_store(
    q: torch.Tensor,
    latent: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    """Normalizes and rotates the vectors `latent`, stores them in `cache`, and rotates the ends of q's heads in place,
    in one launch."""
    rows, num_heads, head_dim = q.shape
    rank, rope, tuning = weight.size(0), cos_sin.size(1), TUNING.here
    assert q.is_contiguous()
    assert latent.is_contiguous()
    assert cache.is_contiguous()
    assert latent.size(1) == cache.size(3) == rank + rope
    if rows:
        _latent_store[(rows, 1 + triton.cdiv(num_heads, tuning.heads))](
            q,
            latent,
            weight,
            eps,
            cos_sin,
            positions,
            slot_mapping,
            cache,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            RANK=rank,
            ROPE=rope,
            WIDTH=triton.next_power_of_2(rank),
            HALF_WIDTH=triton.next_power_of_2(rope // 2),
            HEADS=tuning.heads,
            num_warps=tuning.warps,
        )


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's call for models with latent attention, except batch-invariantly."""
    if shape.latent is None or shape.batch_invariant:
        return
    heads, rank, rope = shape.num_q_heads, shape.latent.rank, shape.latent.rope
    q, latent = shape.empty(ROWS, heads, shape.latent.still + rope), shape.empty(ROWS, rank + rope)
    cos_sin, cache = floats(shape.block_size * TABLE_WIDTH, rope), shape.latent_cache()
    yield lambda: latent_store(q, latent, shape.empty(rank), 1e-6, cos_sin, ints(ROWS), ints(ROWS), cache)
