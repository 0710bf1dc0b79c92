"""Layers with norms before and after attention and the feed-forward: x + post(attention(pre(x))), likewise the MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.decoder_layer import DecoderLayer, normed

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import LayerPlacement


@dataclass(frozen=True, slots=True)
class NormNames:
    """Checkpoint names of a layer's norms."""

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


class SandwichLayer(DecoderLayer):
    """Decoder layer with norms before and after both attention and feed-forward, as in Gemma 2 and 3 and GLM-4-0414."""

    def __init__(
        self, index: int, config: DecoderConfig, names: NormNames, backend: AttentionBackend, place: LayerPlacement
    ) -> None:
        name = f"model.layers.{index}"

        def norm(own: str) -> RMSNorm:
            eps, offset = config.rms_norm_eps, config.scales.norm_offset
            return RMSNorm(f"{name}.{own}", config.hidden_size, eps, place, offset=offset)

        self._before_attention, self._after_attention = norm(names.before_attention), norm(names.after_attention)
        self._before_mlp, self._after_mlp = norm(names.before_mlp), norm(names.after_mlp)
        self._attention = Attention(f"{name}.self_attn", config, config.sliding_windows[index], backend, place)
        size, dense = config.intermediate_size, config.feed_forward
        self.mlp = MLP(
            f"{name}.mlp",
            config.hidden_size,
            size,
            dense.bias,
            place,
            activation=dense.activation,
            fused=dense.fused,
        )
        norms = (self._before_attention, self._after_attention, self._before_mlp, self._after_mlp)
        self._parts = (self._attention, self.mlp, *norms)

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Normalizes the input, stores keys and values and returns the queries."""
        x = normed(self._before_attention, x, residual)
        return self._attention.store(x, batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends, adds the normed result to the residual in place, and returns the normed feed-forward."""
        attended = self._after_attention(self._attention.attend(q, cache, metadata))
        return self._after_mlp(self.mlp(self._before_mlp(attended, residual)))
