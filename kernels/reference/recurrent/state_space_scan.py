"""State space layers with one decay per head (Mamba 2, arXiv 2405.21060), in the notation of linear attention.

With S a head's state [key_dim, value_dim] (there: the state's size, the head's), for each token a step d > 0:

    S = exp(rate d) S + k (d v)^T        k there: B, v: x
    o = S^T q                            q there: C
"""

from __future__ import annotations

import torch
from torch.nn import functional

from quire.kernels.reference.recurrent.gated_delta_rule import CHUNK, follow
from quire.kernels.reference.recurrent.state_rows import decode_pages, spans
from quire.kernels.state_pages import StatePages


def state_space_scan(
    qkv: torch.Tensor,
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

    qkv: as in gated_delta_rule, without normalization
    step, rate, step_bias: [num_tokens, num_heads] and twice float32 [num_heads]: d is softplus(step + step_bias), and
        rates are below 0
    pages, block_tables, query_start, seq_lens: as in gated_delta_rule
    Returns [num_tokens, num_heads, value_dim] in qkv's dtype; everything is computed in float32.
    """
    shape = pages.shape
    values = shape.num_heads * shape.value_dim
    keys = (qkv.size(1) - values) // 2
    q, k, v = qkv.float().split((keys, keys, values), dim=1)
    repeats = shape.num_heads // (keys // shape.key_dim)
    q, k = (part.unflatten(1, (-1, shape.key_dim)).repeat_interleave(repeats, dim=1) for part in (q, k))
    v = v.unflatten(1, (shape.num_heads, shape.value_dim))
    share = functional.softplus(step.float() + step_bias)
    decay = rate * share
    if query_start is not None:
        where = spans(block_tables, query_start, seq_lens, block_size, CHUNK)
        return follow(q, k, v, decay, share, pages, where, _chunk).to(qkv.dtype)
    of_rows, num_first = decode_pages(block_tables, seq_lens, block_size), shape.num_first
    first, others = pages.heads
    state = torch.cat((first[of_rows.read], others[of_rows.read]), dim=1)
    state.masked_fill_(~of_rows.goes_on[:, None, None, None], 0)
    state = state * decay.exp()[:, :, None, None] + k.unsqueeze(3) * (share.unsqueeze(2) * v).unsqueeze(2)
    first[of_rows.written], others[of_rows.written] = state[:, :num_first], state[:, num_first:]
    return (q.unsqueeze(2) @ state).squeeze(2).to(qkv.dtype)


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, share: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs [num_heads, num_tokens, value_dim] and the next state, for inputs [num_heads, num_tokens,
    ...]."""
    total = decay.cumsum(1)
    ratio = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
    u = share.unsqueeze(2) * v
    out = total.exp().unsqueeze(2) * (q @ state) + (ratio * (q @ k.transpose(1, 2))) @ u
    last = total[:, -1:]
    state = last.exp().unsqueeze(2) * state + (k * (last - total).exp().unsqueeze(2)).transpose(1, 2) @ u
    return out, state
