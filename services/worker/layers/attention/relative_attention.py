"""Attention with a learned bias for the distance between two tokens (T5, arXiv 1910.10683)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.sharding import portion

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.placement import Destination, LayerPlacement

MAX_GATHERED = 1 << 26  # elements of keys that are copied out of their blocks at once


@dataclass(frozen=True, slots=True)
class DistanceBuckets:
    """Distances between tokens in classes of equal bias: exact ones, then ones that grow with the logarithm."""

    num_buckets: int
    max_distance: int  # larger distances are all in the last bucket
    has_future: bool  # half of the buckets are for later tokens; else there are none

    def of(self, distances: Tensor) -> Tensor:
        """Returns the bucket of each distance, the querying token's position less the other's: int64 -> int64 of the
        same shape."""
        import torch

        count = self.num_buckets // 2 if self.has_future else self.num_buckets
        first = (distances < 0).long() * count if self.has_future else torch.zeros_like(distances)
        distances = distances.abs() if self.has_future else distances.clamp(min=0)
        num_exact = count // 2
        steps = torch.log(distances.float() / num_exact) / math.log(self.max_distance / num_exact)
        far = (num_exact + (steps * (count - num_exact)).long()).clamp(max=count - 1)
        return first + torch.where(distances < num_exact, distances, far)


class RelativeBias:
    """Biases of this rank's heads, by distance."""

    def __init__(self, name: str, num_heads: int, buckets: DistanceBuckets, length: int, place: LayerPlacement) -> None:
        """Builds the biases without weights. `length`: that of the longest sequence."""
        self._name, self._buckets, self._length, self._total = name, buckets, length, num_heads
        self._heads = place.shard.part(num_heads, "num_attention_heads")
        self._given: Tensor = place.empty(buckets.num_buckets, len(self._heads))
        self.by_distance: Tensor = self._given  # [heads, distances], once loaded

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", portion(self._given, 1, (self._heads,), self._total)

    def finish(self) -> None:
        """Spreads the loaded biases over distances from `length` - 1 down to 0, or to 1 - `length` with later
        tokens."""
        import torch

        least = 1 - self._length if self._buckets.has_future else 0
        distances = torch.arange(least, self._length, device=self._given.device)
        self.by_distance = self._given[self._buckets.of(distances)].t().contiguous()

    def square(self, length: int) -> Tensor:
        """Returns the biases between all tokens of a text of `length` tokens, [heads, length, length]."""
        import torch

        places = torch.arange(length, device=self.by_distance.device)
        return self.by_distance[:, places[:, None] - places[None, :] + self._length - 1]


class RelativeAttention(Attention):
    """Causal self attention whose scores have a bias. A backend's kernels have none, so torch computes it: keys and
    values are copied out of their blocks."""

    bias: RelativeBias  # set before the first step; several layers may have the same

    def _attended(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        return biased_attention(q, Paged(cache.k, cache.v), metadata, ScoreBias(self.bias.by_distance, self._scale))


class Paged(NamedTuple):
    """Keys and values, [num_blocks, block_size, num_heads, head_dim] each."""

    k: Tensor
    v: Tensor

    @property
    def block_size(self) -> int:
        return self.k.size(1)


class ScoreBias(NamedTuple):
    """Scores are multiplied by `scale`; then by_distance[head, distance] is added."""

    by_distance: Tensor
    scale: float


def biased_attention(q: Tensor, paged: Paged, metadata: AttentionMetadata, bias: ScoreBias) -> Tensor:
    """Computes causal attention over paged keys and values, as AttentionBackend.attend() does, with biased scores.
    Queries have as many heads as keys."""
    import torch

    if metadata.is_decode:
        return _decoded(q, paged, metadata, bias)
    assert metadata.query_start is not None
    starts, ends = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    attended = torch.empty_like(q)
    for row, end in enumerate(ends):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.start < tokens.stop:
            blocks = metadata.block_tables[row, : -(-end // paged.block_size)]
            attended[tokens] = _chunk(q[tokens], paged, blocks, end, bias)
    return attended


def _decoded(q: Tensor, paged: Paged, metadata: AttentionMetadata, bias: ScoreBias) -> Tensor:
    """Attends with one token a row, [num_rows, heads, head_dim], some rows at a time."""
    import torch

    if not len(q):
        return q
    size = max(1, MAX_GATHERED // (metadata.max_seq_len * q[0].numel()))
    blocks = metadata.block_tables[:, : -(-metadata.max_seq_len // paged.block_size)]
    parts = zip(q.split(size), blocks.split(size), metadata.seq_lens.split(size), strict=True)
    return torch.cat([_decoded_rows(rows, paged, own, lens, bias) for rows, own, lens in parts])


def _decoded_rows(q: Tensor, paged: Paged, blocks: Tensor, lens: Tensor, bias: ScoreBias) -> Tensor:
    """Attends with one token a row to all blocks of `blocks` [num_rows, num_blocks], of which rows have `lens`
    positions."""
    import torch
    from torch.nn import functional

    k, v = (cache[blocks.long()].flatten(1, 2) for cache in paged)  # [num_rows, positions, heads, head_dim]
    distances = lens.long()[:, None] - 1 - torch.arange(k.size(1), device=q.device)
    is_hidden = distances < 0
    k, v = (values.masked_fill(is_hidden[:, :, None, None], 0).transpose(1, 2) for values in (k, v))
    added = bias.by_distance[:, distances.clamp(min=0)].transpose(0, 1)
    added = added.masked_fill(is_hidden[:, None], float("-inf")).unsqueeze(2).to(q.dtype)
    whole = functional.scaled_dot_product_attention(q.unsqueeze(2), k, v, attn_mask=added, scale=bias.scale)
    return whole.squeeze(2)


def _chunk(q: Tensor, paged: Paged, blocks: Tensor, end: int, bias: ScoreBias) -> Tensor:
    """Attends with the last tokens of one sequence, [num_tokens, heads, head_dim], which has `end` positions."""
    import torch
    from torch.nn import functional

    k, v = (cache[blocks.long()].flatten(0, 1)[:end].transpose(0, 1).unsqueeze(0) for cache in paged)
    positions = torch.arange(end, device=q.device)
    distances = positions[end - q.size(0) :, None] - positions
    added = bias.by_distance[:, distances.clamp(min=0)].masked_fill(distances < 0, float("-inf")).to(q.dtype)
    whole = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=added.unsqueeze(0), scale=bias.scale
    )
    return whole[0].transpose(0, 1)
