"""Splits the fused query-key-value product: queries for attention, keys and values to the cache."""

from __future__ import annotations

import torch

from quire.kernels.reference.attention.kv_dtype import as_bytes, to_cache
from quire.kernels.reference.rms_norm import rms_norm


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
    """Normalises queries and keys per head (where weights are given), rotates them, and stores keys and values.

    qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], queries, then keys, then values
    q_weight, k_weight: [head_dim] or both None; eps belongs to them
    cos_sin: float32 [max_positions, head_dim], cosines in the first half of a row, sines in the second
    positions: int32 [num_tokens]
    slot_mapping: int32 [num_tokens], block * block_size + offset of each token's key and value; several tokens may
        write to one slot of block 0, the null block, which is never read
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], written in place; in qkv's dtype or in another
        (kernels/reference/attention/kv_dtype.py)
    Returns the queries, [num_tokens, num_q_heads, head_dim], in qkv's dtype.

    Rotation pairs element i with i + head_dim / 2 (arXiv 2104.09864, in the halves form of Hugging Face checkpoints).
    """
    head_dim = k_cache.size(-1)
    num_rotated = num_q_heads + num_kv_heads
    heads = qkv.view(qkv.size(0), num_rotated + num_kv_heads, head_dim)
    rotated, v = heads.split((num_rotated, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        weight = torch.cat((q_weight.expand(num_q_heads, -1), k_weight.expand(num_kv_heads, -1)))
        rotated = rms_norm(rotated, weight, eps)
    turned = _rotate(rotated, cos_sin.index_select(0, positions))
    q, k = (part.to(qkv.dtype) for part in turned.split((num_q_heads, num_kv_heads), dim=1))  # rounded once
    for cache, rows in ((k_cache, k), (v_cache, v)):
        as_bytes(cache).view(-1, num_kv_heads, head_dim)[slot_mapping] = as_bytes(to_cache(rows, cache))
    return q.contiguous()  # the layout expected by attention


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [num_tokens, num_heads, head_dim] by cos_sin [num_tokens, head_dim]; returns float32."""
    wide = x.float()
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    out = wide * torch.cat((cos, cos), dim=-1)
    left, right = wide.chunk(2, dim=-1)
    out_left, out_right = out.chunk(2, dim=-1)
    out_left.sub_(right * sin)
    out_right.add_(left * sin)
    return out
