"""Attention over keys and values in blocks (arXiv 2309.06180)."""

from __future__ import annotations

import torch
from torch.nn import functional

from quire.kernels.reference.attention.decode_parts import DecodePart, DecodeParts, decode_parts, in_path
from quire.kernels.reference.attention.kv_dtype import as_bytes, take_blocks


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
    parts: DecodeParts | None = None,
    seen_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes causal attention of each sequence's last rows over its whole length, for prefills and decodes alike.

    q: [num_tokens, num_q_heads, head_dim], sequence after sequence
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], in any float dtype; query head h reads kv head
        h // (num_q_heads // num_kv_heads)
    block_tables: int32 [num_seqs, width], the blocks of each sequence in order; width * block_size bounds seq_lens
    query_start: int32 [num_seqs + 1], rows of sequence i are query_start[i] to query_start[i + 1], at least one each;
        num_tokens == num_seqs therefore means that every sequence has one row, and query_start is not read
    seq_lens: int32 [num_seqs], positions of each sequence, these rows included: its row j (of n) is position
        seq_lens - n + j and sees positions up to itself (bottom-right alignment)
    sliding_window: 0: none; else a row at position p sees positions over p - sliding_window only
    chunked: the window does not slide: positions fall into chunks of sliding_window, from 0 on, and a row sees those of
        its own chunk only
    sinks: None, or float32 [num_q_heads]: an unscaled score per head that takes part in every softmax without a value
        (arXiv 2309.17453, section 3.3)
    softcap: 0: none; else a scaled score s becomes softcap * tanh(s / softcap) (arXiv 2408.00118, section 2)
    tree_mask: None, or int64 [num_tokens], for rows in a tree of drafts (arXiv 2305.09781, section 4.2): bit
        i, from 0 on, says whether a row sees the position i before its own; further back than 63 it sees all. -1: all
    parts: for one row per sequence, the result of decode_parts() for several layers; None: computed here
    seen_ends: None, or int32 [num_tokens], for rows that see later ones of a range, such as a picture: the position
        after the last one that a row sees, at most seq_lens. Rows with less than their own position + 1 see those up to
        themselves, as does every row of a step with one row per sequence. Windows bound what is seen before a row only
    Returns [num_tokens, num_q_heads, head_dim] in q's dtype.

    Slots of a last block past seq_lens may hold anything, including NaN; so may blocks that no table contains.
    """
    assert sliding_window or not chunked
    is_single = q.size(0) == 1 and q.device.type == "cpu"  # the length can be read, and no mask is needed
    if q.size(0) == block_tables.size(0) and not is_single:
        if parts is None:
            parts = decode_parts(block_tables, seq_lens, k_cache, q.dtype, sliding_window, chunked, tree_mask)
        return _decode(q, k_cache, v_cache, parts, scale, sinks, softcap)
    assert query_start is not None or is_single, "a sequence has several rows"
    results = []
    starts, lens = [0, 1] if is_single or query_start is None else query_start.tolist(), seq_lens.tolist()
    for i, seq_len in enumerate(lens):
        rows = slice(starts[i], starts[i + 1])
        k, v = (_gather(cache, block_tables[i], seq_len) for cache in (k_cache, v_cache))
        mask, ends = (None if columns is None else columns[rows] for columns in (tree_mask, seen_ends))
        results.append(_attend(q[rows], k, v, scale, sliding_window, sinks, softcap, chunked, mask, ends))
    return torch.cat(results) if len(results) > 1 else results[0]


def _gather(cache: torch.Tensor, table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Gathers a sequence's keys or values, [seq_len, num_kv_heads, head_dim]."""
    blocks = table[: -(-seq_len // cache.size(1))]
    return take_blocks(cache, blocks).flatten(0, 1)[:seq_len]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
    softcap: float,
    chunked: bool,
    tree_mask: torch.Tensor | None,
    seen_ends: torch.Tensor | None,
) -> torch.Tensor:
    """Attends in one sequence: q [num_rows, num_q_heads, head_dim], its last rows, k and v [seq_len,
    num_kv_heads, head_dim] -> like q. Arguments as in paged_attention."""
    num_rows, num_keys = q.size(0), k.size(0)
    is_causal = tree_mask is None and (seen_ends is None or num_rows == 1)
    is_plain = sinks is None and not softcap and is_causal and not 0 < window < num_keys
    if is_plain and num_rows == 1:
        k, v = (t.to(q.dtype).transpose(0, 1).unsqueeze(0) for t in (k, v))
        return _plain_rows(q, k, v, None, scale)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k.to(q.dtype), v.to(q.dtype)))
    if is_plain and num_rows == num_keys:  # causal flag instead of a mask: half the work
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        query_positions = torch.arange(num_keys - num_rows, num_keys, device=q.device).unsqueeze(1)
        key_positions = torch.arange(num_keys, device=q.device)
        seen = _seen(query_positions, key_positions, window, chunked, seen_ends)
        if tree_mask is not None:
            seen &= in_path(query_positions - key_positions, tree_mask)
        out = _softmax_sum(q, k, v, seen, scale, sinks, softcap)
    return out.squeeze(0).transpose(0, 1)


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    parts: DecodeParts,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Attends with one row per sequence, q [num_seqs, num_q_heads, head_dim], part by part; the result is in q's
    order."""
    if parts.order is not None:
        q = q.index_select(0, parts.order)
    results = []
    for part in parts.parts:
        rows = q[part.rows]
        k, v = (_gather_places(cache, part, q.dtype) for cache in (k_cache, v_cache))
        if sinks is None and not softcap:
            # On a CPU an additive mask costs two thirds of a boolean one (490 us and 730 us for 32 sequences).
            results.append(_plain_rows(rows, k, v, part.bias if q.is_cpu else part.seen, scale))
        else:
            results.append(_softmax_sum(rows.unsqueeze(2), k, v, part.seen, scale, sinks, softcap).squeeze(2))
    out = torch.cat(results) if len(results) > 1 else results[0]
    return out if parts.back is None else out.index_select(0, parts.back)


def _gather_places(cache: torch.Tensor, part: DecodePart, dtype: torch.dtype) -> torch.Tensor:
    """Gathers a part's keys or values, [num_rows, num_kv_heads, width, head_dim]."""
    tokens = as_bytes(cache).view(-1, *cache.shape[2:])
    results = tokens.index_select(0, part.places).view(cache.dtype).to(dtype)
    return results.view(part.seen.size(0), part.seen.size(3), *cache.shape[2:]).transpose(1, 2)


def _plain_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attends with one row per sequence: q [n, num_q_heads, head_dim], k and v as in _softmax_sum -> like q.

    Query heads of one kv head are batched as rows: torch's products for single rows are several times slower in 16
    bits. For two heads in float32 they are faster (measured: 0.5 ms and 0.7 ms for 32 sequences with 8 heads of 32).
    """
    n, num_q_heads, head_dim = q.shape
    group = num_q_heads // k.size(1)
    if group <= 2 and q.dtype is torch.float32:
        group = 1
    rows = q.reshape(n, num_q_heads // group, group, head_dim)
    out = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.reshape(q.shape)


def _softmax_sum(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """Attends: q [n, num_q_heads, num_rows, head_dim], k and v [n, num_kv_heads, num_keys, head_dim] -> like q. `seen`:
    bool, broadcast to [n, num_q_heads, num_rows, num_keys]."""
    if sinks is None and not softcap:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    group = q.size(1) // k.size(1)
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return (scores.softmax(3) @ v).to(q.dtype)
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return (torch.cat((scores, sink), 3).softmax(3)[..., :-1] @ v).to(q.dtype)


def _seen(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int,
    chunked: bool,
    seen_ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the mask, bool [num_rows, num_keys]: causal, or up to later `seen_ends` [num_rows], within a sliding or
    chunked window (0: none). Positions are broadcast."""
    seen = key_positions <= query_positions
    if seen_ends is not None:
        seen = seen | (key_positions < seen_ends.unsqueeze(1))
    if not window:
        return seen
    before = query_positions % window + 1 if chunked else window  # positions visible to a row, including itself
    return seen & (key_positions > query_positions - before)
