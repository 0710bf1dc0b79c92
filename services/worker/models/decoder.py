"""The one decoder that runs every family here."""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.attention.port import AttentionBackend, AttentionMetadata
from services.worker.forward_batch import ForwardBatch
from services.worker.kv_cache import LayerCache
from services.worker.layers.attention import Attention
from services.worker.layers.embedding import Embedding, OutputHead, TiedOutputHead
from services.worker.layers.mlp import MLP
from services.worker.layers.placement import Placement, Tensor
from services.worker.layers.rms_norm import RMSNorm
from services.worker.layers.rotary import cos_sin_table
from services.worker.models.decoder_config import DecoderConfig


class DecoderLayer:
    """Attention, then feed-forward, each before the residual stream and with a norm at its door."""

    def __init__(self, index: int, config: DecoderConfig, backend: AttentionBackend, place: Placement) -> None:
        name, size, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(f"{name}.input_layernorm", size, eps, place)
        window = config.sliding_windows[index]
        self.attention = Attention(f"{name}.self_attn", config, window, backend, place)
        self.middle_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, place)
        self.mlp = MLP(f"{name}.mlp", size, config.intermediate_size, config.mlp_bias, place)
        self._parts = (self.input_norm, self.attention, self.middle_norm, self.mlp)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """`x`: what the layer before adds to the residual (updated in place); None before the first layer."""
        attended = self.attention(self._normed(x, residual), batch, cache, cos_sin)
        return self.mlp(self.middle_norm(attended, residual))

    def store(self, x: Tensor, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """The first part of that, without which later steps cannot do: keys and values. Returns the queries."""
        return self.attention.store(self._normed(x, residual), batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """The rest, for the tokens in `metadata`."""
        return self.mlp(self.middle_norm(self.attention.attend(q, cache, metadata), residual))

    def _normed(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.input_norm(residual) if x is None else self.input_norm(x, residual)


class Decoder:
    """Tokens to logits."""

    def __init__(self, config: DecoderConfig, backend: AttentionBackend, place: Placement, num_positions: int) -> None:
        """`num_positions`: longest sequence that will be run."""
        self.config = config
        self._embed = place.ops.embed
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self.embedding = Embedding("model.embed_tokens", vocab_size, hidden_size, place)
        self.layers = [DecoderLayer(i, config, backend, place) for i in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", hidden_size, config.rms_norm_eps, place)
        tied = config.tie_word_embeddings
        self.head = TiedOutputHead(self.embedding, place) if tied else OutputHead(vocab_size, hidden_size, place)
        self.cos_sin = cos_sin_table(config.rope, config.head_dim, num_positions).to(place.device)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        for part in (self.embedding, *self.layers, self.norm, self.head):
            yield from part.destinations()

    def finish(self) -> None:
        for part in (self.embedding, *self.layers, self.norm, self.head):
            part.finish()

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Hidden states [num_samples, hidden_size] of the tokens whose logits are wanted."""
        residual: Tensor = self.embedding(batch.token_ids)
        x: Tensor = None
        for layer, cache in zip(self.layers[:-1], caches[:-1], strict=True):
            x = layer(x, residual, batch, cache, self.cos_sin)
        layer, cache, wanted = self.layers[-1], caches[-1], batch.logit_tokens
        if batch.last is not None and wanted is not None:
            q = layer.store(x, residual, batch, cache, self.cos_sin)
            return self._finish(q, residual, cache, wanted, batch.last)
        x = layer(x, residual, batch, cache, self.cos_sin)
        if wanted is not None:
            x, residual = (self._embed(wanted, t) for t in (x, residual))  # a gather of rows
        return self.norm(x, residual)

    def _finish(
        self, q: Tensor, residual: Tensor, cache: LayerCache, wanted: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """The last layer behind its cache, for the `wanted` tokens alone: 3 % of what a prompt takes."""
        q, residual = (t.index_select(0, wanted) for t in (q, residual))
        if not wanted.size(0):
            return residual
        return self.norm(self.layers[-1].complete(q, residual, cache, metadata), residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_samples, vocab_size] in the model's dtype"""
        logits: Tensor = self.head(hidden)
        return logits
