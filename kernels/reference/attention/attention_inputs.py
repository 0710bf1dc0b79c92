"""From the fused query-key-value product to queries ready for attention and keys and values in the cache."""

from __future__ import annotations

import torch

from kernels.reference.attention.kv_dtype import as_bytes, to_cache
from kernels.reference.rms_norm import rms_norm


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
    slot_mapping: int32 [num_tokens], block * block_size + offset of each token's key and value; block 0 is nobody's:
        several tokens may go to one of its places, and nobody reads them
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], written in place; in qkv's dtype or in another
        (kernels/reference/attention/kv_dtype.py)
    Returns the queries, [num_tokens, num_q_heads, head_dim], in qkv's dtype.

    Rotation pairs element i with i + head_dim / 2 (arXiv 2104.09864, in the halves form of Hugging Face checkpoints).
    """
    head_dim = k_cache.size(-1)
    heads = qkv.view(qkv.size(0), num_q_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # each [num_tokens, 1, head_dim / 2]
    for cache, rows in ((k_cache, _rotate(k, cos, sin)), (v_cache, v)):
        as_bytes(cache).view(-1, num_kv_heads, head_dim)[slot_mapping] = as_bytes(to_cache(rows, cache))
    return _rotate(q, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In float32, rounded once."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
