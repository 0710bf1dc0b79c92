"""Attention over keys and values that lie in blocks (arXiv 2309.06180), by kind of step."""

from __future__ import annotations

import torch

from kernels.triton.attention.chunk_attention import chunk_attention
from kernels.triton.attention.decode_attention import decode_attention


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    chunked: bool = False,
) -> torch.Tensor:
    if q.size(0) == block_tables.size(0):
        return decode_attention(
            q, k_cache, v_cache, block_tables, seq_lens, scale, sliding_window, None, sinks, softcap, chunked
        )
    return chunk_attention(
        q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, sliding_window, sinks, softcap, chunked
    )
