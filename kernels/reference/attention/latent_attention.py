"""Multi-head latent attention (arXiv 2405.04434, section 2.1) over a cache of compressed vectors.

All heads read one vector per token: `rank` compressed elements, from which every head's keys and values are derived,
followed by `rope` rotated elements of the keys, shared by all heads. The weight that derives keys is applied to the
queries, the one that derives values to the result (`head_linear`): attention itself is between queries and a single key
of rank + rope elements, whose first `rank` elements are also the value.
"""

from __future__ import annotations

import torch

from quire.kernels.reference.attention.decode_parts import gathered_bytes
from quire.kernels.reference.attention.kv_dtype import as_bytes, take_blocks, to_cache
from quire.kernels.reference.rms_norm import rms_norm


def prepare_head_linear(weight: torch.Tensor) -> torch.Tensor:
    """Packs `weight` [num_heads, out_features, in_features], once, when the model is loaded."""
    return weight.transpose(1, 2)


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies each head: [num_tokens, num_heads, in_features] -> [num_tokens, num_heads, out_features], dense.

    x: elements of a head are contiguous; tokens and heads may have any strides.
    """
    out = x.new_empty(x.size(0), x.size(1), weight.size(2))
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def latent_store(
    q: torch.Tensor,
    latent: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    """Normalizes the compressed vectors, rotates queries and keys, and stores the vectors in the cache.

    q: [num_tokens, num_heads, head_dim]; the last `rope` elements of each head are rotated in place
    latent: [num_tokens, rank + rope]: the compressed vector, then the part of the key that is rotated
    weight, eps: of the compressed vector's norm, [rank]
    cos_sin: float32 [max_positions, rope], cosines in the first half of a row, sines in the second
    positions: int32 [num_tokens]
    slot_mapping: int32 [num_tokens], block * block_size + offset of each token's vector; block 0 is the null block
    cache: [num_blocks, block_size, 1, rank + rope], written in place; in q's dtype or in another (kv_dtype.py)

    Rotation pairs element i with i + rope / 2, as in attention_inputs.py.
    """
    rank, rope = weight.size(0), cos_sin.size(1)
    compressed, rotated = latent.split((rank, rope), dim=1)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # each [num_tokens, 1, rope / 2]
    turned = _rotate(rotated.unsqueeze(1), cos, sin).squeeze(1)
    rows = torch.cat((rms_norm(compressed, weight, eps), turned), dim=1)
    as_bytes(cache).view(-1, rank + rope)[slot_mapping] = as_bytes(to_cache(rows, cache))
    tail = q[..., q.size(2) - rope :]
    tail.copy_(_rotate(tail, cos, sin))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates in float32 and rounds once."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def latent_attention(
    q: torch.Tensor,
    q_rotated: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor | None,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of each sequence's last rows over its whole length (paged_attention.py), with one key for all.

    q: [num_tokens, num_heads, rank], sequence after sequence: meets the compressed vectors
    q_rotated: [num_tokens, num_heads, rope]: meets the rotated part; elements of a head side by side, tokens and heads
        may have any strides
    cache: [num_blocks, block_size, 1, rank + rope], in any float dtype
    block_tables, query_start, seq_lens: as paged_attention has them
    Returns [num_tokens, num_heads, rank], sums of compressed vectors, in q's dtype.

    Slots of a last block past seq_lens may hold anything, including NaN; so may blocks that no table contains.
    """
    whole, rank = torch.cat((q, q_rotated), dim=2), q.size(2)
    if q.size(0) == block_tables.size(0):
        return _decode(whole, rank, cache, block_tables, seq_lens, scale)
    assert query_start is not None, "a sequence has several rows"
    out = torch.empty_like(q)
    starts, lens = query_start.tolist(), seq_lens.tolist()
    for i, seq_len in enumerate(lens):
        rows = slice(starts[i], starts[i + 1])
        blocks = block_tables[i, : -(-seq_len // cache.size(1))]
        keys = take_blocks(cache, blocks).flatten(0, 1)[:seq_len].to(q.dtype)  # [seq_len, 1, rank + rope]
        positions = torch.arange(seq_len, device=q.device)
        seen = positions <= torch.arange(seq_len - starts[i + 1] + starts[i], seq_len, device=q.device).unsqueeze(1)
        out[rows] = _attend(whole[rows].unsqueeze(0), keys.view(1, seq_len, -1), seen.unsqueeze(0), rank, scale)[0]
    return out


def _decode(
    q: torch.Tensor,
    rank: int,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attends with one row per sequence, padded to the width of the tables, in chunks of bounded memory; no length is
    read on the host. q: [num_seqs, num_heads, rank + rope]."""
    width = block_tables.size(1) * cache.size(1)
    chunk = max(1, gathered_bytes(q.device) // (width * cache.size(3) * q.element_size()))
    positions = torch.arange(width, device=q.device)
    parts = []
    for start in range(0, q.size(0), chunk):
        rows = slice(start, start + chunk)
        seen = positions < seq_lens[rows].unsqueeze(1)  # [rows, width]
        blocks = take_blocks(cache, block_tables[rows].flatten()).to(q.dtype)
        keys = blocks.view(seen.size(0), width, -1).masked_fill(~seen.unsqueeze(2), 0)  # a masked NaN would spread
        parts.append(_attend(q[rows].unsqueeze(1), keys, seen.unsqueeze(1), rank, scale).squeeze(1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend(q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """Attends: q [n, num_rows, num_heads, rank + rope], keys [n, num_keys, rank + rope], seen [n, num_rows, num_keys].

    Returns [n, num_rows, num_heads, rank].
    """
    n, num_rows, num_heads, size = q.shape
    scores = q.reshape(n, num_rows * num_heads, size).float() @ keys.float().transpose(1, 2) * scale
    scores = scores.view(n, num_rows, num_heads, -1).masked_fill(~seen.unsqueeze(-2), float("-inf"))
    weights = scores.softmax(3).view(n, num_rows * num_heads, -1)
    return (weights @ keys[..., :rank].float()).to(q.dtype).view(n, num_rows, num_heads, rank)
