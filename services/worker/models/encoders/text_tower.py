"""Text towers of models that compare texts with pictures: CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343).

Pictures have a tower of their own (models/vision/two_towers.py). A picture's prompt is one token, whose vector is the
row that the other tower has computed, so that both are pooled and returned in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.bidirectional_attention import BidirectionalAttention, CausalPromptAttention
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.embedding import Embedding
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.encoders.encoder import EncoderModel
from quire.services.worker.models.encoders.encoder_config import EncoderConfig, read_encoder

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement, Loadable

TOWER = "text_model"


class TextTowerLayer:
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, name: str, config: EncoderConfig, place: LayerPlacement, attention: type[BidirectionalAttention]
    ) -> None:
        size, eps = config.hidden_size, config.norm_eps
        inputs = [Projection(f"{name}.self_attn.{part}_proj", size) for part in ("q", "k", "v")]
        self._first = LayerNorm(f"{name}.layer_norm1", size, eps, place)
        self._attention = attention(inputs, Projection(f"{name}.self_attn.out_proj", size), config, place, layer=0)
        self._second = LayerNorm(f"{name}.layer_norm2", size, eps, place)
        up, down = Projection(f"{name}.mlp.fc1", config.intermediate_size), Projection(f"{name}.mlp.fc2", size)
        self._mlp = PlainMLP(up, down, size, True, place, activation=config.activation)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in (self._first, self._attention, self._second, self._mlp):
            yield from part.destinations()

    def finish(self) -> None:
        for part in (self._first, self._attention, self._second, self._mlp):
            part.finish()

    def __call__(self, x: Tensor, batch: ForwardBatch, cos_sin: Tensor) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape; `cos_sin` is not used."""
        x = x + self._attention(self._first(x), batch, cos_sin)
        return x + self._mlp(self._second(x))


class TextTower(EncoderModel, ABC):
    """Tower with learned positions and a projection into the space that texts and pictures share."""

    base: ClassVar[str] = TOWER
    unused: ClassVar[tuple[str, ...]] = (
        *("logit_scale", "logit_bias", "visual_projection.", f"{TOWER}.embeddings.position_ids"),
    )
    pooling: ClassVar[str] = "last"
    attention: ClassVar[type[BidirectionalAttention]] = BidirectionalAttention

    def __init__(self, config: EncoderConfig, place: LayerPlacement, num_positions: int) -> None:
        super().__init__(config, place, num_positions)
        size, name = config.hidden_size, f"{TOWER}.embeddings"
        self._words = Embedding(f"{name}.token_embedding", config.vocab_size, size, place)
        self._positions = Embedding(f"{name}.position_embedding", config.max_positions, size, place, sharded=False)
        self._norm = LayerNorm(f"{TOWER}.final_layer_norm", size, config.norm_eps, place)
        self._projection = self.projection(config, place)

    @staticmethod
    @abstractmethod
    def projection(config: EncoderConfig, place: LayerPlacement) -> Linear:
        """Returns the projection of the pooled state."""

    @classmethod
    def layer(cls, index: int, config: EncoderConfig, place: LayerPlacement) -> TextTowerLayer:
        return TextTowerLayer(f"{TOWER}.encoder.layers.{index}", config, place, cls.attention)

    @property
    def parts(self) -> Sequence[Loadable]:
        return (self._words, self._positions, self._norm, self._projection)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Returns the sum of word and position embeddings, [num_tokens, hidden_size]."""
        return self._words(batch.token_ids) + self._positions(batch.positions)

    def finalize(self, x: Tensor) -> Tensor:
        """Projects the normalized states: [num_wanted, hidden_size] -> [num_wanted, projection_size]."""
        return self._projection(self._norm(x))

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Returns the vectors [num_wanted, projection_size] of the wanted tokens; those of pictures are their rows."""
        if batch.media is None:
            return super().forward(batch, caches)
        vectors = batch.media.place(super().forward(replace(batch, logit_tokens=None), caches))
        return vectors if batch.logit_tokens is None else vectors.index_select(0, batch.logit_tokens)


class ClipText(TextTower):
    """CLIP's text tower: tokens see earlier ones only, and the vector is that of the end token, which comes last."""

    attention: ClassVar[type[BidirectionalAttention]] = CausalPromptAttention

    @staticmethod
    def read(config: ConfigFile) -> EncoderConfig:
        return replace(read_encoder(config), projection_size=config.integer("projection_dim"))

    @staticmethod
    def projection(config: EncoderConfig, place: LayerPlacement) -> Linear:
        return Linear([Projection("text_projection", config.projection_size)], config.hidden_size, False, place)


class SiglipText(TextTower):
    """SigLIP's text tower: all tokens see each other, padding included, and the vector is that of the last one."""

    @staticmethod
    def read(config: ConfigFile) -> EncoderConfig:
        encoder = read_encoder(config)
        size = config.integer("projection_size", encoder.hidden_size) if config.has("projection_size") else 0
        return replace(encoder, projection_size=size or encoder.hidden_size)

    @staticmethod
    def projection(config: EncoderConfig, place: LayerPlacement) -> Linear:
        return Linear([Projection(f"{TOWER}.head", config.projection_size)], config.hidden_size, True, place)
