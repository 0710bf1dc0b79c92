"""Gated delta rule: linear attention with a decaying state that is corrected towards each token's value (arXiv
2412.06464).

With S a head's state [key_dim, value_dim], q and k normalized (q also divided by the root of key_dim), and for each
token a decay a in (0, 1] and a strength b in (0, 1):

    u = b (v - (a S)^T k)        corrects a part of the difference
    S = a S + k u^T
    o = S^T q

Several tokens at once (arXiv 2406.06484): with A the product of decays from the first token on, the u of a chunk solve

    u_i + b_i sum_{j < i} (A_i / A_j) (k_i . k_j) u_j = b_i (v_i - A_i S^T k_i)

which is triangular, and outputs and the next state are products of matrices. Decays are handled as logarithms whose
differences are never positive, so that nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn import functional

from quire.kernels.reference.recurrent.state_rows import TokenSpan, decode_pages, spans
from quire.kernels.state_pages import StatePages

CHUNK = 64  # tokens computed at once
LENGTH_EPS = 1e-6  # of the normalization of queries and keys
Chunk = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # outputs and the next state


def gated_delta_rule(
    qkv: torch.Tensor,
    strength: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    step_bias: torch.Tensor,
    pages: StatePages,
    block_tables: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Computes the outputs of all tokens, and stores the states at the ends of blocks and rows in the pages.

    qkv: [num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim], elements of a token contiguous: queries,
        keys, values; head h has the query and the key of head h // (num_heads // num_key_heads). Both are normalized.
    strength: [num_tokens, num_heads]; its sigmoid is b
    step, rate, step_bias: [num_tokens, num_heads] and twice float32 [num_heads]: the decay is
        exp(rate * softplus(step + step_bias)), with rates below 0
    pages, block_tables, query_start, seq_lens: as in short_convolution, with states instead of inputs
    Returns [num_tokens, num_heads, value_dim] in qkv's dtype; everything is computed in float32.
    """
    shape = pages.shape
    values = shape.num_heads * shape.value_dim
    keys = (qkv.size(1) - values) // 2
    q, k, v = qkv.float().split((keys, keys, values), dim=1)
    q, k = (_normalize_to_unit_length(part.unflatten(1, (-1, shape.key_dim))) for part in (q, k))
    repeats = shape.num_heads // (keys // shape.key_dim)
    q, k = (part.repeat_interleave(repeats, dim=1) for part in (q * shape.key_dim**-0.5, k))
    v = v.unflatten(1, (shape.num_heads, shape.value_dim))
    decay = rate * functional.softplus(step.float() + step_bias)  # its logarithm
    share = strength.float().sigmoid()
    if query_start is None:
        return _decode(q, k, v, decay, share, pages, block_tables, seq_lens, block_size).to(qkv.dtype)
    out = follow(q, k, v, decay, share, pages, spans(block_tables, query_start, seq_lens, block_size, CHUNK), _chunk)
    return out.to(qkv.dtype)


def _normalize_to_unit_length(x: torch.Tensor) -> torch.Tensor:
    """Normalizes vectors in the last dimension to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


def follow(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    share: torch.Tensor,
    pages: StatePages,
    where: Iterable[TokenSpan],
    chunk: Chunk,
) -> torch.Tensor:
    """Processes spans in order: reads each row's state from its page, applies `chunk`, and stores states where spans
    say so. q, k, v: [num_tokens, num_heads, ...], decay and share [num_tokens, num_heads]; returns outputs like v.
    Shared with state_space_scan."""
    (first, others), num_first = pages.heads, pages.shape.num_first
    out, state = torch.empty_like(v), first[:0]
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))  # [num_heads, num_tokens, ...]
    decay, share = decay.t(), share.t()
    for span in where:
        if span.begins:
            state = torch.zeros(v.size(0), k.size(2), v.size(2), device=v.device)
        elif span.read >= 0:
            state = torch.cat((first[span.read], others[span.read]))
        rows = slice(span.begin, span.end)
        found, state = chunk(q[:, rows], k[:, rows], v[:, rows], decay[:, rows], share[:, rows], state)
        out[rows] = found.transpose(0, 1)
        if span.written >= 0:
            first[span.written], others[span.written] = state[:num_first], state[num_first:]
    return out


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, share: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs [num_heads, num_tokens, value_dim] and the next state, for inputs [num_heads, num_tokens,
    ...]."""
    total = decay.cumsum(1)
    since = total.unsqueeze(2) - total.unsqueeze(1)  # decay of token i since token j
    ratio = since.tril().exp().tril()
    kept = total.exp().unsqueeze(2)
    share = share.unsqueeze(2)
    before = share * ratio * (k @ k.transpose(1, 2))
    wanted = share * (v - kept * (k @ state))
    u = torch.linalg.solve_triangular(before, wanted, upper=False, unitriangular=True)
    out = kept * (q @ state) + (ratio * (q @ k.transpose(1, 2))) @ u
    last = total[:, -1:]
    state = last.exp().unsqueeze(2) * state + (k * (last - total).exp().unsqueeze(2)).transpose(1, 2) @ u
    return out, state


def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    share: torch.Tensor,
    pages: StatePages,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Computes one token per row and stores its new state; no length is read on the host. Returns [num_rows, num_heads,
    value_dim] in float32."""
    of_rows, (first, others), num_first = (
        decode_pages(block_tables, seq_lens, block_size),
        pages.heads,
        pages.shape.num_first,
    )
    state = torch.cat((first[of_rows.read], others[of_rows.read]), dim=1)
    state.masked_fill_(~of_rows.goes_on[:, None, None, None], 0)
    state *= decay.exp()[:, :, None, None]
    u = share.unsqueeze(2) * (v - (k.unsqueeze(2) @ state).squeeze(2))
    state += k.unsqueeze(3) * u.unsqueeze(2)
    first[of_rows.written], others[of_rows.written] = state[:, :num_first], state[:, num_first:]
    return (q.unsqueeze(2) @ state).squeeze(2)
