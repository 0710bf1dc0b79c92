"""Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values are made of a small vector a token.

What is cached here is every head's own keys and values, not that vector: attention is then as any other, and the cache
larger than it need be. Values are shorter than keys and padded with zeros to their length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.worker.layers.linear import Linear, Projection
from services.worker.layers.rms_norm import RMSNorm
from services.worker.layers.sharding import of_heads

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.attention.port import AttentionBackend, AttentionMetadata
    from services.worker.kv.kv_cache import LayerCache
    from services.worker.layers.placement import Destination, Loadable, Placement
    from services.worker.models.decoder_config import DecoderConfig
    from services.worker.models.single_row import RowKernels
    from services.worker.step.forward_batch import ForwardBatch

NORM_EPS = 1e-6  # of the latent vectors, whatever the model's


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of the latent vectors and of a head's parts."""

    q_rank: int  # 0: queries are projected at once
    kv_rank: int
    still_dim: int  # of a head's keys, not rotated
    rotated_dim: int  # of a head's keys; all heads share it
    value_dim: int


class LatentAttention:
    """Queries and keys of a head: a part that is not rotated, then one that is."""

    def __init__(self, name: str, config: DecoderConfig, backend: AttentionBackend, place: Placement) -> None:
        assert config.latent is not None
        self._config, self._latent, self._backend, self._ops = config, config.latent, backend, place.ops
        latent, hidden, heads = config.latent, config.hidden_size, config.num_q_heads
        own = place.shard.heads(heads, heads).queries
        self._num_heads = len(own)
        q_size, bias = heads * config.head_dim, config.qkv_bias
        queries = of_heads(own, config.head_dim)
        self._parts: list[Loadable] = []
        self._q_down = self._q_norm = None
        if latent.q_rank:
            self._q_down = Linear([Projection(f"{name}.q_a_proj", latent.q_rank)], hidden, bias, place)
            self._q_norm = RMSNorm(f"{name}.q_a_layernorm", latent.q_rank, NORM_EPS, place)
            self._q_up = Linear([Projection(f"{name}.q_b_proj", q_size, taken=queries)], latent.q_rank, False, place)
            self._parts += [self._q_down, self._q_norm]
        else:
            self._q_up = Linear([Projection(f"{name}.q_proj", q_size, taken=queries)], hidden, False, place)
        kv_size = latent.kv_rank + latent.rotated_dim
        self._kv_down = Linear([Projection(f"{name}.kv_a_proj_with_mqa", kv_size)], hidden, bias, place)
        self._kv_norm = RMSNorm(f"{name}.kv_a_layernorm", latent.kv_rank, NORM_EPS, place)
        made_dim = latent.still_dim + latent.value_dim
        made = Projection(f"{name}.kv_b_proj", heads * made_dim, taken=of_heads(own, made_dim))
        self._kv_up = Linear([made], latent.kv_rank, False, place)
        (values,) = of_heads(own, latent.value_dim)
        output = Projection(f"{name}.o_proj", hidden)
        self._output = Linear([output], heads * latent.value_dim, config.o_bias, place, columns=values)
        self._parts += [self._q_up, self._kv_down, self._kv_norm, self._kv_up, self._output]

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        return self.attend(self.store(x, batch, cache, cos_sin), cache, batch.attention)

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Keys and values to the cache; returns the queries, [num_tokens, num_q_heads, head_dim]."""
        heads = self._num_heads
        return self._ops.qk_norm_rope_store(
            self._projected(x),
            None,
            None,
            self._config.rms_norm_eps,
            cos_sin,
            batch.positions,
            batch.slot_mapping,
            cache.k,
            cache.v,
            heads,
            heads,
        )

    def _projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side; the elements of a head as its rotation wants them."""
        import torch

        latent, num_tokens, heads = self._latent, x.size(0), self._num_heads
        q = self._q_up(x if self._q_down is None or self._q_norm is None else self._q_norm(self._q_down(x)))
        q_still, q_rotated = q.view(num_tokens, heads, -1).split((latent.still_dim, latent.rotated_dim), dim=2)
        compressed, k_rotated = self._kv_down(x).split((latent.kv_rank, latent.rotated_dim), dim=1)
        made = self._kv_up(self._kv_norm(compressed.contiguous())).view(num_tokens, heads, -1)
        k_still, v = made.split((latent.still_dim, latent.value_dim), dim=2)
        k_rotated = k_rotated.unsqueeze(1).expand(-1, heads, -1)
        v = torch.nn.functional.pad(v, (0, self._config.head_dim - latent.value_dim))
        parts = (self._arranged(q_still, q_rotated), self._arranged(k_still, k_rotated), v)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def _arranged(self, still: Tensor, rotated: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim]: of every pair one element is in the first half, one in the second."""
        import torch

        first, second = (
            (rotated[..., ::2], rotated[..., 1::2]) if self._config.rope.interleaved else rotated.chunk(2, dim=2)
        )
        still_first, still_second = still.chunk(2, dim=2)
        return torch.cat((first, still_first, second, still_second), dim=2)

    def attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """The queries of the tokens in `metadata` -> [num_tokens, hidden_size]"""
        assert self._config.attention_scale is not None
        scale = self._config.attention_scale
        attended = self._backend.attend(q, cache.k, cache.v, metadata, scale=scale, window=0)
        return self._output(attended[..., : self._latent.value_dim].flatten(1))

    def run_row(
        self, kernels: RowKernels, residual: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache
    ) -> None:
        raise AssertionError("not offered: the fused chain has no latent vectors")
