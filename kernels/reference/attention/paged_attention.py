"""Attention over keys and values that lie in blocks (arXiv 2309.06180)."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.reference.attention.kv_dtype import as_bytes, take_blocks

GATHERED_ELEMENTS = 1 << 26  # bounds what decode copies out of the cache at a time: 256 MiB of float32
LAST_BIT = 63  # of a tree's mask


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
) -> torch.Tensor:
    """Causal attention of each sequence's last rows over its whole length, in one call for prefills and decodes alike.

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
    sinks: None, or float32 [num_q_heads]: a score of each head, not scaled, that takes its share of every softmax and
        gives nothing (arXiv 2309.17453, section 3.3)
    softcap: 0: none; else a scaled score s becomes softcap * tanh(s / softcap) (arXiv 2408.00118, section 2)
    tree_mask: None, or int64 [num_tokens], of rows that stand in a tree of drafts (arXiv 2305.09781, section 4.2): bit
        i, from 0 on, says whether a row sees the position i before its own; further back than 63 it sees all. -1: all
    Returns [num_tokens, num_q_heads, head_dim] in q's dtype.

    Places of a last block past seq_lens may hold anything, NaN included; so may blocks that no table names.
    """
    assert sliding_window or not chunked
    is_single = q.size(0) == 1 and q.device.type == "cpu"  # where a length can be read, and nothing need be masked
    if q.size(0) == block_tables.size(0) and not is_single:
        return _decode(
            q, k_cache, v_cache, block_tables, seq_lens, scale, sliding_window, sinks, softcap, chunked, tree_mask
        )
    assert query_start is not None or is_single, "a sequence has several rows"
    parts = []
    starts, lens = [0, 1] if is_single or query_start is None else query_start.tolist(), seq_lens.tolist()
    for i, seq_len in enumerate(lens):
        rows = slice(starts[i], starts[i + 1])
        k, v = (_gather(cache, block_tables[i], seq_len) for cache in (k_cache, v_cache))
        mask = None if tree_mask is None else tree_mask[rows]
        parts.append(_attend(q[rows], k, v, scale, sliding_window, sinks, softcap, chunked, mask))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _gather(cache: torch.Tensor, table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """[seq_len, num_kv_heads, head_dim]"""
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
) -> torch.Tensor:
    """One sequence: q [num_rows, num_q_heads, head_dim], k and v [seq_len, num_kv_heads, head_dim]."""
    num_rows, num_keys = q.size(0), k.size(0)
    is_plain = sinks is None and not softcap and tree_mask is None and not 0 < window < num_keys
    if is_plain and num_rows == 1:
        k, v = (t.to(q.dtype).transpose(0, 1).unsqueeze(0) for t in (k, v))
        return _plain_rows(q, k, v, None, scale)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k.to(q.dtype), v.to(q.dtype)))
    if is_plain and num_rows == num_keys:  # without a mask, half of it is left out
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        query_positions = torch.arange(num_keys - num_rows, num_keys, device=q.device).unsqueeze(1)
        key_positions = torch.arange(num_keys, device=q.device)
        seen = _seen(query_positions, key_positions, window, chunked)
        if tree_mask is not None:
            seen &= _in_path(query_positions - key_positions, tree_mask)
        out = _softmax_sum(q, k, v, seen, scale, sinks, softcap)
    return out.squeeze(0).transpose(0, 1)


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None,
    softcap: float,
    chunked: bool,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    """One row per sequence, all padded to the width of the tables: no length is read on the host."""
    width = block_tables.size(1) * k_cache.size(1)
    per_row = width * k_cache.size(2) * k_cache.size(3)
    chunk = max(1, GATHERED_ELEMENTS // per_row)
    key_positions = torch.arange(width, device=q.device)
    parts = []
    for rows in (slice(start, start + chunk) for start in range(0, q.size(0), chunk)):
        query_positions = seq_lens[rows].unsqueeze(1) - 1
        seen = _seen(query_positions, key_positions, window, chunked)  # [rows, width]
        if tree_mask is not None:
            seen &= _in_path(query_positions - key_positions, tree_mask[rows])
        places = _places(block_tables[rows], k_cache.size(1))
        # A masked NaN would still spread: where nothing is seen lies what the row sees anyway, its own key and value,
        # or those of some place if it is padding.
        places = torch.where(seen, places, places.gather(1, query_positions.clamp(min=0).long()))
        k, v = (_gather_places(cache, places, q.dtype) for cache in (k_cache, v_cache))
        if sinks is None and not softcap:
            parts.append(_plain_rows(q[rows], k, v, _mask(seen, q.dtype)[:, None, None], scale))
        else:
            summed = _softmax_sum(q[rows].unsqueeze(2), k, v, seen[:, None, None], scale, sinks, softcap)
            parts.append(summed.squeeze(2))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _places(tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """[rows, width]: where in the cache each position lies, block * block_size + offset."""
    offsets = torch.arange(block_size, dtype=tables.dtype, device=tables.device)
    return (tables.unsqueeze(2) * block_size + offsets).flatten(1)


def _gather_places(cache: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[rows, num_kv_heads, width, head_dim]"""
    tokens = as_bytes(cache).view(-1, *cache.shape[2:])
    found = tokens.index_select(0, places.flatten()).view(cache.dtype).to(dtype)
    return found.view(*places.shape, *cache.shape[2:]).transpose(1, 2)


def _mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """On a CPU numbers to add cost torch two thirds of what truths do (490 us and 730 for 32 sequences)."""
    if seen.device.type != "cpu":
        return seen
    return torch.zeros((), dtype=dtype).masked_fill(~seen, float("-inf"))


def _plain_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """One row of each sequence: q [n, num_q_heads, head_dim], k and v as _softmax_sum has them -> like q

    Query heads of one kv head stand as its rows: torch's products for single rows cost a multiple in 16 bits. Of two
    heads in float32 they cost less (measured: 0.5 ms and 0.7 for 32 sequences with 8 heads of 32).
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
    """q [n, num_q_heads, num_rows, head_dim], k and v [n, num_kv_heads, num_keys, head_dim] -> like q"""
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


def _seen(query_positions: torch.Tensor, key_positions: torch.Tensor, window: int, chunked: bool) -> torch.Tensor:
    seen = key_positions <= query_positions
    if not window:
        return seen
    before = query_positions % window + 1 if chunked else window  # a row sees so many, itself included
    return seen & (key_positions > query_positions - before)


def _in_path(distances: torch.Tensor, tree_mask: torch.Tensor) -> torch.Tensor:
    """`distances` [num_rows, num_keys] back from each row, negative ahead of it -> whether its mask has the bit."""
    bits = tree_mask.unsqueeze(1) >> distances.clamp(0, LAST_BIT)
    return (bits & 1).bool() | (distances > LAST_BIT)
