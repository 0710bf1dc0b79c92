"""Gemma as an encoder, in which all tokens of a prompt see each other: the text model of ColPali (arXiv 2407.01449)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.bidirectional_attention import BidirectionalAttention
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.embedding import Embedding
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.models.encoders.encoder import EncoderModel
from quire.services.worker.models.encoders.encoder_config import EncoderConfig
from quire.services.worker.models.families.gemma import read_gemma

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement, Loadable


class GemmaEncoderLayer:
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, name: str, config: EncoderConfig, place: LayerPlacement, *, layer: int) -> None:
        size, eps, attention = config.hidden_size, config.norm_eps, f"{name}.self_attn"
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        inputs = [Projection(f"{attention}.{part}_proj", count * config.head_dim) for part, count in heads.items()]
        output = Projection(f"{attention}.o_proj", size)
        self._first = RMSNorm(f"{name}.input_layernorm", size, eps, place, offset=1.0)
        self._attention = BidirectionalAttention(inputs, output, config, place, layer=layer)
        self._second = RMSNorm(f"{name}.post_attention_layernorm", size, eps, place, offset=1.0)
        inner = config.intermediate_size
        self._mlp = MLP(f"{name}.mlp", size, inner, config.mlp_bias, place, activation=config.activation)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in (self._first, self._attention, self._second, self._mlp):
            yield from part.destinations()

    def finish(self) -> None:
        for part in (self._first, self._attention, self._second, self._mlp):
            part.finish()

    def __call__(self, x: Tensor, batch: ForwardBatch, cos_sin: Tensor) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape; `cos_sin` is the rotary table."""
        x = x + self._attention(self._first(x), batch, cos_sin)
        return x + self._mlp(self._second(x))


class GemmaEncoder(EncoderModel):
    """Text model of ColPali: rows of the page's picture take the place of token embeddings."""

    base: ClassVar[str] = "model"
    unused: ClassVar[tuple[str, ...]] = ("lm_head.weight", "model.lm_head.weight")

    def __init__(self, config: EncoderConfig, place: LayerPlacement, num_positions: int) -> None:
        super().__init__(config, place, num_positions)
        size = config.hidden_size
        self._words = Embedding("model.embed_tokens", config.vocab_size, size, place, math.sqrt(size))
        self._norm = RMSNorm("model.norm", size, config.norm_eps, place, offset=1.0)

    @staticmethod
    def read(config: ConfigFile) -> EncoderConfig:
        """Reads the text part of config.json. Raises InvalidArgument for other text models than Gemma."""
        kind = config.get("model_type", "gemma")
        if kind != "gemma":
            raise refusal("text_config.model_type", kind, "supported for ColPali: gemma")
        decoder = read_gemma(config)
        return EncoderConfig(
            vocab_size=decoder.vocab_size,
            hidden_size=decoder.hidden_size,
            intermediate_size=decoder.intermediate_size,
            num_layers=decoder.num_layers,
            num_heads=decoder.num_q_heads,
            norm_eps=decoder.rms_norm_eps,
            activation=decoder.feed_forward.activation,
            max_positions=decoder.max_positions,
            dtype=decoder.dtype,
            ropes=(decoder.rope,) * decoder.num_layers,
            attention_bias=decoder.attention.qkv_bias,
            mlp_bias=False,
            head_size=decoder.head_dim,
            shared_kv_heads=decoder.num_kv_heads,
        )

    @staticmethod
    def layer(index: int, config: EncoderConfig, place: LayerPlacement) -> GemmaEncoderLayer:
        return GemmaEncoderLayer(f"model.layers.{index}", config, place, layer=index)

    @property
    def parts(self) -> Sequence[Loadable]:
        return (self._words, self._norm)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Returns the scaled embeddings of tokens, with the rows of pictures in the places of theirs."""
        embedded = self._words(batch.token_ids)
        return embedded if batch.media is None else batch.media.place(embedded)

    def finalize(self, x: Tensor) -> Tensor:
        return self._norm(x)
