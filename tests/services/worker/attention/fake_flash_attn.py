"""Fake of the two used functions of flash-attn 2.8.3, according to their docstrings and to the checks in its
csrc/flash_attn/flash_api.cpp: in plain torch, on any device, over pages only."""

from __future__ import annotations

import itertools

import torch

Window = tuple[int, int]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert (cu_seqlens_q.dtype, cu_seqlens_k.dtype) == (torch.int32, torch.int32)
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_q.shape == cu_seqlens_k.shape
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert key_starts[0] == 0
    out = torch.empty_like(q)
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        num_keys = key_starts[i + 1] - key_starts[i]
        assert end - begin <= max_seqlen_q
        assert num_keys <= max_seqlen_k
        row = q[begin:end], _pages(k, block_table, i, num_keys, q), _pages(v, block_table, i, num_keys, q)
        out[begin:end] = _attend(*row, softmax_scale, causal, window_size)
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    assert q.dim() == 4
    assert cache_seqlens is not None
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.shape == (q.size(0),)
    rows = []
    for i, num_keys in enumerate(cache_seqlens.tolist()):
        row = q[i], _pages(k_cache, block_table, i, num_keys, q), _pages(v_cache, block_table, i, num_keys, q)
        rows.append(_attend(*row, softmax_scale, causal, window_size))
    return torch.stack(rows)


def _pages(
    cache: torch.Tensor, block_table: torch.Tensor | None, row: int, num_keys: int, q: torch.Tensor
) -> torch.Tensor:
    """Gathers a row's keys or values, [num_keys, num_kv_heads, head_dim]."""
    assert block_table is not None
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == 1
    assert cache.size(1) % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert cache.dtype == q.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.size(-1) <= 256
    assert q.size(-1) % 8 == 0
    blocks = block_table[row, : -(-num_keys // cache.size(1))].long()
    return cache[blocks].flatten(0, 1)[:num_keys]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool, window: Window
) -> torch.Tensor:
    """Attends in one sequence; the masks are aligned to the bottom right corner."""
    group = q.size(1) // k.size(1)
    keys, values = (t.double().repeat_interleave(group, 1) for t in (k, v))
    at = torch.arange(q.size(0), device=q.device).unsqueeze(1) + k.size(0) - q.size(0)
    key = torch.arange(k.size(0), device=q.device)
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(q.size(0), k.size(0), dtype=torch.bool, device=q.device)
    if left >= 0:
        seen &= key >= at - left
    if right >= 0:
        seen &= key <= at + right
    scores = torch.einsum("rhd,khd->hrk", q.double(), keys) * (scale or q.size(-1) ** -0.5)
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values).to(q.dtype)
