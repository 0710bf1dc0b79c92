"""Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values are derived from a small vector per
token.

The cache holds that vector and the rotated part of the key, shared by all heads. The weight that derives keys is
applied to the queries, the one that derives values to the attention result (kernels/reference/latent_attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.services.worker.layers.linear import Linear, Projection, parts_of
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.sharding import head_features

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionMetadata, LatentBackend
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement, Loadable
    from quire.services.worker.models.config.decoder_config import DecoderConfig

NORM_EPS = 1e-6  # for the latent vectors, independent of the model's


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of latent vectors and of the parts of a head."""

    q_rank: int  # 0: queries are not compressed
    kv_rank: int
    nope_dim: int  # part of a head's keys without rotation
    rope_dim: int  # rotated part of the keys, shared by all heads
    value_dim: int

    @property
    def cached_dim(self) -> int:
        """Cached elements per token, for all heads together."""
        return self.kv_rank + self.rope_dim


class LatentUpProjection:
    """Up-projection of compressed vectors to keys and values (`kv_b_proj`), split by head and into two parts.

    Adapters cannot change it: they would have to be applied to the queries of their own sequences only.
    """

    def __init__(self, name: str, latent: LatentConfig, num_heads: int, own: range, place: LayerPlacement) -> None:
        size = latent.nope_dim + latent.value_dim
        part = Projection(name, num_heads * size, taken=head_features(own, size))
        self._loaded = parts_of([part], latent.kv_rank, False, place, columns=range(latent.kv_rank), quantized=False)
        self._latent, self._num_heads, self._ops = latent, len(own), place.ops
        self._keys: Any = None  # packed by the ops once loaded
        self._values: Any = None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._loaded.destinations()

    def finish(self) -> None:
        """Splits the loaded weight into those of keys and values, packs both by head and frees it."""
        latent = self._latent
        weight = self._loaded.dequantized().view(self._num_heads, -1, latent.kv_rank)
        keys, values = weight.split((latent.nope_dim, latent.value_dim), dim=1)
        self._keys = self._ops.prepare_head_linear(keys.transpose(1, 2).contiguous())
        self._values = self._ops.prepare_head_linear(values.contiguous())
        del self._loaded

    def queries(self, unrotated: Tensor) -> Tensor:
        """Maps queries [num_tokens, num_heads, nope_dim] to the compressed space: [num_tokens, num_heads, kv_rank]."""
        return self._ops.head_linear(unrotated, self._keys)

    def values(self, latent_outputs: Tensor) -> Tensor:
        """Maps sums of compressed vectors [num_tokens, num_heads, kv_rank] to [num_tokens, num_heads, value_dim]."""
        return self._ops.head_linear(latent_outputs, self._values)


class LatentAttention:
    """Multi-head latent attention: caches one compressed vector per token for all heads.

    A head's keys have a part without and one with rotation. Builds this rank's heads; the compressed vector is on every
    rank.
    """

    def __init__(self, name: str, config: DecoderConfig, backend: LatentBackend, place: LayerPlacement) -> None:
        assert config.latent is not None
        assert config.attention.scale is not None
        self._scale = config.attention.scale
        self._config, self._latent, self._backend, self._place = config, config.latent, backend, place
        latent, hidden, heads = config.latent, config.hidden_size, config.num_q_heads
        own = place.shard.heads(heads, 1).queries
        self._num_heads = len(own)
        q_size, bias = heads * config.head_dim, config.attention.qkv_bias
        queries = head_features(own, config.head_dim)
        self._parts: list[Loadable] = []
        self._q_down = self._q_norm = None
        if latent.q_rank:
            self._q_down = Linear([Projection(f"{name}.q_a_proj", latent.q_rank)], hidden, bias, place)
            self._q_norm = RMSNorm(f"{name}.q_a_layernorm", latent.q_rank, NORM_EPS, place)
            self._q_up = Linear([Projection(f"{name}.q_b_proj", q_size, taken=queries)], latent.q_rank, False, place)
            self._parts += [self._q_down, self._q_norm]
        else:
            self._q_up = Linear([Projection(f"{name}.q_proj", q_size, taken=queries)], hidden, False, place)
        self._kv_down = Linear([Projection(f"{name}.kv_a_proj_with_mqa", latent.cached_dim)], hidden, bias, place)
        self._kv_norm = RMSNorm(f"{name}.kv_a_layernorm", latent.kv_rank, NORM_EPS, place)
        self._made = LatentUpProjection(f"{name}.kv_b_proj", latent, heads, own, place)
        (values,) = head_features(own, latent.value_dim)
        output = Projection(f"{name}.o_proj", hidden)
        self._output = Linear([output], heads * latent.value_dim, config.attention.o_bias, place, columns=values)
        self._parts += [self._q_up, self._kv_down, self._kv_norm, self._made, self._output]

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        self._reorder()
        for part in self._parts:
            part.finish()

    def _reorder(self) -> None:
        """Permutes the rotated rows of queries and keys: one element of each pair in the first half, the other in the
        second."""
        import torch

        from quire.services.worker.layers.attention.rotary import row_order

        latent = self._latent
        order = row_order(self._config.rope, latent.rope_dim)
        if order is None:
            return
        order = order.to(self._place.device)

        def behind(num_still: int) -> Tensor:
            return torch.cat((torch.arange(num_still, device=order.device), num_still + order))

        heads = torch.arange(self._num_heads, device=order.device)[:, None] * self._config.head_dim
        self._q_up.reorder((heads + behind(latent.nope_dim)).flatten())
        self._kv_down.reorder(behind(latent.kv_rank))

    def defer_all_reduce(self) -> None:
        """Leaves the output a rank's partial sum, which the caller adds up."""
        self._output.defer_all_reduce()

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Attends: x [num_tokens, hidden_size] -> the same shape."""
        return self.attend(self.store(x, batch, cache, cos_sin), cache, batch.attention)

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Stores each token's normalized compressed vector and rotated key in the cache.

        Returns the queries, [num_tokens, num_heads, head_dim], rotated in their last rope_dim elements.
        """
        q = self._q_up(x if self._q_down is None or self._q_norm is None else self._q_norm(self._q_down(x)))
        q = q.view(q.size(0), self._num_heads, self._config.head_dim)
        norm = self._kv_norm
        self._place.ops.latent_store(
            q, self._kv_down(x), norm.weight, norm.eps, cos_sin, batch.positions, batch.slot_mapping, cache.k
        )
        return q

    def attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends in the compressed space with the queries of the tokens in `metadata`; returns [num_tokens,
        hidden_size]."""
        unrotated, rotated = q.split((self._latent.nope_dim, self._latent.rope_dim), dim=2)
        latent_outputs = self._backend.attend_latent(
            self._made.queries(unrotated), rotated, cache.k, metadata, scale=self._scale
        )
        return self._output(self._made.values(latent_outputs).flatten(1))
