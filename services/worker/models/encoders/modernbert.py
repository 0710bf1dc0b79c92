"""ModernBERT (arXiv 2412.13663): rotary positions, gated feed-forward, pre-norm layers, local attention in most
layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.bidirectional_attention import BidirectionalAttention
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.embedding import Embedding
from quire.services.worker.layers.feed_forward.activation import gated
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.layers.pooled_classifier import PooledClassifier
from quire.services.worker.models.config.rope_config import RopeConfig, read_section
from quire.services.worker.models.encoders.encoder import EncoderModel
from quire.services.worker.models.encoders.encoder_config import CLS, MEAN, EncoderConfig, read_activation, read_encoder

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement, Loadable

GLOBAL, LOCAL = "full_attention", "sliding_attention"
HEAD = ("head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias", "decoder.weight", "decoder.bias")


class ModernBertLayer:
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)).

    The first layer has no attention norm, because the embedding is normalized.
    """

    def __init__(self, name: str, config: EncoderConfig, place: LayerPlacement, *, layer: int) -> None:
        size, bias, eps = config.hidden_size, config.norm_bias, config.norm_eps
        self._first = LayerNorm(f"{name}.attn_norm", size, eps, place, bias=bias) if layer else None
        inputs, output = [Projection(f"{name}.attn.Wqkv", 3 * size)], Projection(f"{name}.attn.Wo", size)
        self._attention = BidirectionalAttention(inputs, output, config, place, layer=layer)
        self._second = LayerNorm(f"{name}.mlp_norm", size, eps, place, bias=bias)
        inner = config.intermediate_size
        self._up = Linear([Projection(f"{name}.mlp.Wi", 2 * inner)], size, config.mlp_bias, place)
        self._down = Linear([Projection(f"{name}.mlp.Wo", size)], inner, config.mlp_bias, place)
        self._gate = gated(config.activation, place)

    @property
    def _parts(self) -> Sequence[Loadable]:
        norm = () if self._first is None else (self._first,)
        return (*norm, self._attention, self._second, self._up, self._down)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor, batch: ForwardBatch, cos_sin: Tensor) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape; `cos_sin` is the layer's rotary table."""
        normed = x if self._first is None else self._first(x)
        x = x + self._attention(normed, batch, cos_sin)
        return x.add_(self._down(self._gate(self._up(self._second(x)))))


class ModernBert(EncoderModel):
    """ModernBertModel and ModernBertForSequenceClassification: local attention in most layers, a norm after the
    last."""

    base: ClassVar[str] = "model"
    unused: ClassVar[tuple[str, ...]] = HEAD

    def __init__(self, config: EncoderConfig, place: LayerPlacement, num_positions: int) -> None:
        super().__init__(config, place, num_positions)
        size, eps, bias = config.hidden_size, config.norm_eps, config.norm_bias
        self._words = Embedding("model.embeddings.tok_embeddings", config.vocab_size, size, place)
        self._norm = LayerNorm("model.embeddings.norm", size, eps, place, bias=bias)
        self._last_norm = LayerNorm("model.final_norm", size, eps, place, bias=bias)

    @staticmethod
    def read(config: ConfigFile) -> EncoderConfig:
        """Reads config.json: local and global layers with their own rotary bases, flags for biases. Raises
        InvalidArgument for other poolings or activations."""
        pooler = config.get("classifier_pooling", CLS)
        if pooler not in (CLS, MEAN):
            raise refusal("classifier_pooling", pooler, f"supported: {CLS}, {MEAN}")
        if config.get("classifier_activation", "gelu") != "gelu":
            raise refusal("classifier_activation", config.get("classifier_activation"), "supported: gelu")
        encoder = read_encoder(config)
        kinds = _kinds(config, encoder.num_layers)
        ropes = {kind: _rope(config, kind) for kind in (GLOBAL, LOCAL)}
        reach = config.integer("local_attention", 128) // 2
        return replace(
            encoder,
            norm_eps=config.number("norm_eps", 1e-5),
            activation=read_activation(config, "hidden_activation"),
            half_windows=tuple(reach if kind == LOCAL else 0 for kind in kinds),
            ropes=tuple(ropes[kind] for kind in kinds),
            attention_bias=config.flag("attention_bias"),
            mlp_bias=config.flag("mlp_bias"),
            norm_bias=config.flag("norm_bias"),
            classifier_bias=config.flag("classifier_bias"),
            classifier_activation="gelu",
            classifier_pooler=pooler,
        )

    @staticmethod
    def layer(index: int, config: EncoderConfig, place: LayerPlacement) -> ModernBertLayer:
        return ModernBertLayer(f"model.layers.{index}", config, place, layer=index)

    @staticmethod
    def classifier_of(config: EncoderConfig, place: LayerPlacement) -> PooledClassifier:
        return PooledClassifier("head.dense", "classifier", config, place, norm="head.norm")

    @property
    def parts(self) -> Sequence[Loadable]:
        return (self._words, self._norm, self._last_norm)

    def embed(self, batch: ForwardBatch) -> Tensor:
        return self._norm(self._words(batch.token_ids))

    def finalize(self, x: Tensor) -> Tensor:
        return self._last_norm(x)


def _kinds(config: ConfigFile, num_layers: int) -> list[str]:
    """Returns each layer's attention type: layer_types, else global attention in every third layer, from the first on.

    The interval is global_attn_every_n_layers. Raises InvalidArgument for unknown types or a wrong number of them.
    """
    every = config.integer("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or [LOCAL if index % every else GLOBAL for index in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {GLOBAL, LOCAL}:
        raise refusal("layer_types", kinds, f"{num_layers} of {GLOBAL} and {LOCAL} are needed")
    return kinds


def _rope(config: ConfigFile, kind: str) -> RopeConfig:
    """Reads the rotary configuration of layers of one attention type, in the notation of transformers 5 or earlier."""
    theta = config.get("global_rope_theta", 160_000.0) if kind == GLOBAL else config.get("local_rope_theta", 10_000.0)
    sections = config.section("rope_parameters") or ConfigFile({})
    section = sections.section(kind) or ConfigFile({"rope_type": "default", "rope_theta": float(theta or 10_000.0)})
    return read_section(section, config)
