"""Attention of a decoder to the output of an encoder, whose keys and values are in KV blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.sharding import head_features

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.models.config.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class CrossProjections:
    """Projections as in the checkpoint, without the rank's part."""

    queries: Projection
    keys: Projection
    values: Projection
    output: Projection
    bias: bool


class CrossAttention:
    """Multi-head cross attention. Keys and values are computed once for each item of the encoder."""

    def __init__(
        self, projections: CrossProjections, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement
    ) -> None:
        """Builds this rank's heads without weights."""
        size, head_dim = config.hidden_size, config.head_dim
        self._heads = place.shard.heads(config.num_q_heads, config.num_kv_heads)
        of_queries, of_keys = head_features(self._heads.queries, head_dim), head_features(self._heads.keys, head_dim)
        queries = replace(projections.queries, taken=of_queries)
        keys, values = (replace(part, taken=of_keys) for part in (projections.keys, projections.values))
        (columns,) = of_queries
        bias = projections.bias
        self._queries = Linear([queries], size, bias, place)
        self._keys_values = Linear([keys, values], size, bias, place)
        q_size = config.num_q_heads * head_dim
        self._output = Linear([projections.output], q_size, bias, place, columns=columns)
        self._parts = (self._queries, self._keys_values, self._output)
        self._head_dim, self._scale = head_dim, config.attention.scale or head_dim**-0.5
        self._backend = backend
        self._keeps_queries = False
        self._kept: Tensor | None = None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def store(self, rows: Tensor, tokens: Tensor, cache: LayerCache) -> None:
        """Computes keys and values of the encoder's `rows` [num_rows, hidden_size] and writes them to the places
        `tokens` of the cache (block * block_size + offset), int64 [num_rows]."""
        for part, memory in zip(self._keys_values(rows).chunk(2, dim=-1), (cache.k, cache.v), strict=True):
            heads = part.reshape(rows.size(0), self._heads.num_kv, self._head_dim).to(memory.dtype)
            memory.view(-1, *memory.shape[2:]).index_copy_(0, tokens, heads)

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self._heads.num_q

    @property
    def scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self._scale

    def keep_queries(self, keeps: bool) -> None:
        """Sets whether the queries of each step can be read after it; the last ones are dropped otherwise."""
        self._keeps_queries = keeps
        if not keeps:
            self._kept = None

    @property
    def queries(self) -> Tensor:
        """Queries of the last step's tokens, [num_tokens, num_heads, head_dim], while they are kept."""
        assert self._kept is not None, "keep_queries() was called before the step"
        return self._kept

    def __call__(self, x: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends: x [num_tokens, hidden_size] -> the same shape. `metadata`: each token as a row over the whole output
        of its encoder."""
        q = self._queries(x).view(x.size(0), self._heads.num_q, self._head_dim)
        if self._keeps_queries:
            self._kept = q
        attended = self._backend.attend(q, cache.k, cache.v, metadata, scale=self._scale, window=0)
        return self._output(attended.flatten(1))
