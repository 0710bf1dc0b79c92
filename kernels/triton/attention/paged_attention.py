"""Attention over keys and values in blocks (arXiv 2309.06180), by kind of step.

Only the chunk kernel supports draft trees: steps with trees usually have several rows per sequence.
"""

from __future__ import annotations

import torch

from quire.kernels.triton.attention.chunk_attention import chunk_attention
from quire.kernels.triton.attention.decode_attention import decode_attention


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    chunked: bool = False,
    tree_mask: torch.Tensor | None = None,
    seen_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes causal attention over blocks, [num_tokens, num_q_heads, head_dim]: by decode_attention with one row per
    sequence and no tree, else by chunk_attention, which needs query_start."""
    is_decode = q.size(0) == block_tables.size(0)
    if is_decode and tree_mask is None:
        return decode_attention(
            q, k_cache, v_cache, block_tables, seq_lens, scale, sliding_window, None, sinks, softcap, chunked
        )
    starts = torch.arange(q.size(0) + 1, dtype=torch.int32, device=q.device) if is_decode else query_start
    assert starts is not None, "a sequence has several rows"
    rest = scale, sliding_window, sinks, softcap, chunked, tree_mask, seen_ends
    return chunk_attention(q, k_cache, v_cache, block_tables, starts, seq_lens, *rest)
