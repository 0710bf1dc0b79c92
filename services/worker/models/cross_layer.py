"""Decoder layers with cross attention between self attention and feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.services.worker.models.decoder_layer import DecoderLayer, Norm, normed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from quire.services.worker.attention.port import AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.attention.attention import Attention
    from quire.services.worker.layers.attention.cross_attention import CrossAttention
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination


class FeedForward(Protocol):
    """Feed-forward layer of any form."""

    def destinations(self) -> Iterator[tuple[str, Destination]]: ...

    def finish(self) -> None: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class CrossNorms(NamedTuple):
    """Norms of a layer, in the order in which they are applied."""

    first: Norm
    second: Norm
    third: Norm


class CrossLayer(DecoderLayer):
    """Layer whose three parts read the normed residual stream, to which they are added."""

    def __init__(self, norms: CrossNorms, attention: Attention, cross: CrossAttention, mlp: FeedForward) -> None:
        self.attention, self.cross = attention, cross
        self._norms, self._mlp = norms, mlp
        self._parts = (*norms, attention, cross, mlp)

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Normalizes the input, stores keys and values and returns the queries."""
        return self.attention.store(normed(self._norms.first, x, residual), batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends to the tokens before and to the encoder's output, adding both to the residual in place; returns the
        feed-forward of the normed sum."""
        update = self.attention.attend(q, cache, metadata)
        if metadata.cross is not None:
            assert cache.cross is not None, "the layer has a cache for encoder outputs"
            update = self.cross(self._norms.second(update, residual), cache.cross, metadata.cross)
        return self._mlp(self._norms.third(update, residual))


class PostnormCrossLayer(CrossLayer):
    """Layer after each of whose three parts the sum is normed, as in the first transformers (arXiv 1706.03762). The
    norm after the feed-forward is the first of the next layer, or the model's last."""

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Replaces the residual by its norm, stores keys and values and returns the queries."""
        residual.copy_(normed(self._norms.first, x, residual))
        return self.attention.store(residual, batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends to the tokens before and to the encoder's output, and replaces the residual by the norm of each
        sum; returns the feed-forward of the last."""
        residual.copy_(self._norms.second(self.attention.attend(q, cache, metadata), residual))
        if metadata.cross is not None:
            assert cache.cross is not None, "the layer has a cache for encoder outputs"
            update = self.cross(residual, cache.cross, metadata.cross)
            residual.copy_(self._norms.third(update, residual))
        return self._mlp(residual)


def store_cross(layers: Sequence[DecoderLayer], rows: Tensor, tokens: Tensor, caches: Sequence[LayerCache]) -> None:
    """Computes keys and values of each layer from an encoder's `rows` [num_rows, hidden_size] and writes them to the
    places `tokens` (block * block_size + offset), int64 [num_rows]."""
    for layer, cache in zip(layers, caches, strict=True):
        assert isinstance(layer, CrossLayer)
        assert cache.cross is not None, "every layer attends to the encoder's output"
        layer.cross.store(rows, tokens, cache.cross)
