"""Latent attention on the compiled library. Meaning and shapes: kernels/reference/attention/latent_attention.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels import reference
from quire.kernels.cpu.functions import aligned, dense
from quire.kernels.cpu.native import DTYPES, LIBRARY, calls

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """Weights of all heads in tiles (linear.h), concatenated."""

    dtype: torch.dtype
    code: int
    num_heads: int
    in_features: int
    out_features: int
    pointer: int
    memory: Tensor  # memory of the pointer


def prepare_head_linear(weight: Tensor) -> PackedHeads | Tensor:
    """Packs each head's weight of [num_heads, out_features, in_features] into tiles, copying it; other dtypes use the
    reference's weight."""
    code = DTYPES.get(weight.dtype)
    if code is None:
        return reference.prepare_head_linear(weight)
    weight = weight.detach().contiguous()
    num_heads, out_features, in_features = weight.shape
    num_bytes = LIBRARY.quire_packed_bytes(code, out_features, in_features)
    memory = aligned(num_heads * num_bytes)
    for head, part in enumerate(weight):
        pointer = memory.data_ptr() + head * num_bytes
        LIBRARY.quire_pack_weight(code, out_features, in_features, part.data_ptr(), pointer)
    return PackedHeads(weight.dtype, code, num_heads, in_features, out_features, memory.data_ptr(), memory)


def head_linear(x: Tensor, weight: PackedHeads | Tensor) -> Tensor:
    """Multiplies each head: [num_tokens, num_heads, in_features] -> [num_tokens, num_heads, out_features]; elements of
    a head are contiguous."""
    if type(weight) is not PackedHeads:
        return reference.head_linear(x, weight)
    rows, num_heads, in_features = x.shape
    assert x.dtype is weight.dtype
    assert (num_heads, in_features) == (weight.num_heads, weight.in_features)
    assert x.stride(2) == 1
    out = calls.empty(rows, num_heads, weight.out_features, dtype=weight.dtype)
    calls.head_linear(
        weight.code,
        rows,
        num_heads,
        in_features,
        weight.out_features,
        x.stride(0),
        x.stride(1),
        x.data_ptr(),
        weight.pointer,
        out.data_ptr(),
    )
    return out


def latent_store(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
) -> None:
    """Normalizes and rotates latent vectors, stores them in `cache` and rotates the ends of q's heads in place. Mixed
    dtypes use the reference."""
    code = DTYPES.get(q.dtype)
    if code is None or not (cache.dtype is latent.dtype is weight.dtype is q.dtype):
        return reference.latent_store(q, latent, weight, eps, cos_sin, positions, slot_mapping, cache)
    rank, rope = weight.size(0), cos_sin.size(1)
    assert latent.size(1) == cache.size(3) == rank + rope
    assert positions.dtype is slot_mapping.dtype is torch.int32
    assert cos_sin.dtype is torch.float32
    assert dense(q, latent, weight, cos_sin, positions, slot_mapping, cache)
    calls.latent_store(
        code,
        q.size(0),
        q.size(1),
        q.size(2),
        rank,
        rope,
        eps,
        q.data_ptr(),
        latent.data_ptr(),
        weight.data_ptr(),
        cos_sin.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        cache.data_ptr(),
    )
    return None


def latent_attention(
    q: Tensor,
    q_rotated: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Computes causal attention over cached latent vectors -> [num_tokens, num_heads, rank]. A cache of another dtype
    uses the reference; query_start is required."""
    code = DTYPES.get(q.dtype)
    if code is None or cache.dtype is not q.dtype:
        return reference.latent_attention(q, q_rotated, cache, block_tables, query_start, seq_lens, scale)
    assert block_tables.dtype is query_start.dtype is seq_lens.dtype is torch.int32
    assert block_tables.stride(1) == q_rotated.stride(2) == 1
    assert cache.size(3) == q.size(2) + q_rotated.size(2)
    assert dense(q, cache, query_start, seq_lens)
    out = calls.empty_like(q)
    calls.latent_attention(
        code,
        block_tables.size(0),
        q.size(1),
        q.size(2),
        q_rotated.size(2),
        cache.size(1),
        block_tables.stride(0),
        scale,
        q.data_ptr(),
        q_rotated.data_ptr(),
        q_rotated.stride(0),
        q_rotated.stride(1),
        cache.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        seq_lens.data_ptr(),
        out.data_ptr(),
    )
    return out
