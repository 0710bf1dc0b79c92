"""Rotation of heads in place: one program has some heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS = 16  # heads of one program; not measured


@triton.jit
def _rotate_pairs(
    heads_ptr, cos_sin_ptr, num_heads, stride, HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr
):
    """Rotates HEADS heads of one token, whose pairs are (i, i + HALF)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, WIDTH)
    angles = cos_sin_ptr + token * 2 * HALF + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)[None, :]
    places = heads_ptr + token * stride + head[:, None] * 2 * HALF + pair[None, :]
    inside = (head < num_heads)[:, None] & (pair < HALF)[None, :]
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    dtype = heads_ptr.dtype.element_ty
    tl.store(places, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(places + HALF, (second * cos + first * sin).to(dtype), mask=inside)


def rotate_pairs(heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotates heads [num_tokens, ..., num_heads, head_dim] in place by float32 `cos_sin` [num_tokens, head_dim]."""
    num_tokens, head_dim = heads.size(0), heads.size(-1)
    if not num_tokens:
        return
    flat = heads.view(num_tokens, -1, head_dim)
    assert flat.stride()[1:] == (head_dim, 1)
    half = head_dim // 2
    grid = (num_tokens, triton.cdiv(flat.size(1), HEADS))
    _rotate_pairs[grid](
        flat, cos_sin.contiguous(), flat.size(1), flat.stride(0), half, triton.next_power_of_2(half), HEADS
    )
