"""Layers as in GPT-2: LayerNorm before attention and before a feed-forward layer without gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.decoder_layer import DecoderLayer, normed

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch


class PrenormLayer(DecoderLayer):
    """Pre-norm layer composed of the family's norms, attention and feed-forward."""

    def __init__(self, first: LayerNorm, attention: Attention, second: LayerNorm, mlp: PlainMLP) -> None:
        self._first, self._attention, self._second, self.mlp = first, attention, second, mlp
        self._parts = (first, attention, second, mlp)

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Normalizes the input, stores keys and values and returns the queries."""
        x = normed(self._first, x, residual)
        return self._attention.store(x, batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends and returns the feed-forward of the normed sum, which it adds to the residual in place."""
        return self.mlp(self._second(self._attention.attend(q, cache, metadata), residual))
