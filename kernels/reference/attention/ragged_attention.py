"""Bidirectional attention within each of several concatenated prompts."""

from __future__ import annotations

import torch
from torch.nn import functional


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    longest: int,
    scale: float,
    reach: int,
    num_seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention of every token to all tokens of its sequence, or to those within a window.

    q, k, v: [num_tokens, num_heads, head_dim] in one float dtype, concatenated sequences; heads are contiguous
    query_start: int32 [num_seqs + 1], tokens of sequence i are query_start[i] to query_start[i + 1]
    longest: tokens of the longest sequence
    reach: 0: none; else a token at position p sees positions p - reach to p + reach
    num_seen: None, or int32 [num_seqs], at least 1: only these leading tokens of a sequence are visible; a token that
        sees none gets zeros
    Returns [num_tokens, num_heads, head_dim].
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = query_start.tolist()
    first = 0
    while first + 1 < len(starts):  # consecutive sequences of equal length at once
        begin, length = starts[first], starts[first + 1] - starts[first]
        last = first + 1
        while last + 1 < len(starts) and starts[last + 1] - starts[last] == length:
            last += 1
        rows = slice(begin, starts[last])
        seen = None if num_seen is None else num_seen[first:last]
        out[rows] = _attend(q[rows], k[rows], v[rows], length, scale, reach, seen)
        first = last
    return out


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    length: int,
    scale: float,
    reach: int,
    num_seen: torch.Tensor | None,
) -> torch.Tensor:
    """Attends within consecutive sequences of one length, at least 1, concatenated in q, k and v; num_seen: int32
    [num_seqs] or None."""
    q, k, v = (t.view(-1, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    seen = None
    positions = torch.arange(length, device=q.device)
    if 0 < reach < length - 1:
        seen = (positions - positions.unsqueeze(1)).abs() <= reach
    if num_seen is not None:
        counted = (positions < num_seen.unsqueeze(1))[:, None, None]  # [num_seqs, 1, 1, length]
        seen = counted if seen is None else seen & counted
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    if num_seen is not None and seen is not None and reach:
        attended = attended.masked_fill(~seen.any(-1, keepdim=True), 0)  # a softmax over nothing is NaN
    return attended.transpose(1, 2).flatten(0, 1)
