"""BERT (arXiv 1810.04805): learned positions, token types, post-norm layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.bidirectional_attention import BidirectionalAttention
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.embedding import Embedding
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.layers.pooled_classifier import PooledClassifier
from quire.services.worker.models.encoders.encoder import EncoderModel
from quire.services.worker.models.encoders.encoder_config import EncoderConfig, read_encoder

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement, Loadable

POOLER = ("pooler.dense.weight", "pooler.dense.bias")  # trained for next-sentence prediction, not for embeddings
TRANSFORM = tuple(f"transform.{name}" for name in ("dense.weight", "dense.bias", "LayerNorm.weight", "LayerNorm.bias"))
PREDICTIONS = ("bias", *TRANSFORM, "decoder.weight", "decoder.bias")
RELATION = ("cls.seq_relationship.weight", "cls.seq_relationship.bias")


class BertLayer:
    """Post-norm layer: norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, name: str, config: EncoderConfig, place: LayerPlacement, *, layer: int) -> None:
        size, eps, attention = config.hidden_size, config.norm_eps, f"{name}.attention"
        inputs = [Projection(f"{attention}.self.{part}", size) for part in ("query", "key", "value")]
        output = Projection(f"{attention}.output.dense", size)
        self._attention = BidirectionalAttention(inputs, output, config, place, layer=layer)
        self._first = LayerNorm(f"{attention}.output.LayerNorm", size, eps, place)
        up, down = (
            Projection(f"{name}.intermediate.dense", config.intermediate_size),
            Projection(f"{name}.output.dense", size),
        )
        self._mlp = PlainMLP(up, down, size, True, place, activation=config.activation)
        self._second = LayerNorm(f"{name}.output.LayerNorm", size, eps, place)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in (self._attention, self._first, self._mlp, self._second):
            yield from part.destinations()

    def finish(self) -> None:
        for part in (self._attention, self._first, self._mlp, self._second):
            part.finish()

    def __call__(self, x: Tensor, batch: ForwardBatch, cos_sin: Tensor) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape; `cos_sin` is not used."""
        x = self._first(self._attention(x, batch, cos_sin), x)
        return self._second(self._mlp(x), x)


class Bert(EncoderModel):
    """BertModel and BertForSequenceClassification, whose classifier reads the pooler's output."""

    base: ClassVar[str] = "bert"
    unused: ClassVar[tuple[str, ...]] = (
        "bert.embeddings.position_ids",
        *(f"cls.predictions.{name}" for name in PREDICTIONS),
        *RELATION,
        "linear.weight",  # ColBERT's projection, read by heads/sentence_head.py
    )

    def __init__(self, config: EncoderConfig, place: LayerPlacement, num_positions: int) -> None:
        super().__init__(config, place, num_positions)
        name, size = f"{self.base}.embeddings", config.hidden_size
        rows = config.first_position + config.max_positions
        self._words = Embedding(f"{name}.word_embeddings", config.vocab_size, size, place)
        self._positions = Embedding(f"{name}.position_embeddings", rows, size, place, sharded=False)
        types = config.num_token_types
        self._types = Embedding(f"{name}.token_type_embeddings", types, size, place, sharded=False) if types else None
        self._norm = LayerNorm(f"{name}.LayerNorm", size, config.norm_eps, place)

    @staticmethod
    def read(config: ConfigFile) -> EncoderConfig:
        """Reads config.json with two token types by default. Raises InvalidArgument for unsupported features."""
        return replace(read_encoder(config), num_token_types=config.integer("type_vocab_size", 2))

    @classmethod
    def layer(cls, index: int, config: EncoderConfig, place: LayerPlacement) -> BertLayer:
        return BertLayer(f"{cls.base}.encoder.layer.{index}", config, place, layer=index)

    @classmethod
    def classifier_of(cls, config: EncoderConfig, place: LayerPlacement) -> PooledClassifier:
        return PooledClassifier(f"{cls.base}.pooler.dense", "classifier", config, place)

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of checkpoint tensors to ignore: heads of pre-training, and the pooler, which only a classifier
        loads."""
        return (*self.unused, *(f"{self.base}.{name}" for name in POOLER))

    @property
    def parts(self) -> Sequence[Loadable]:
        return (self._words, self._positions, *(() if self._types is None else (self._types,)), self._norm)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Returns the normalized sum of word, position and token type embeddings, [num_tokens, hidden_size].

        Steps without token types use type 0 for all tokens.
        """
        first = self.config.first_position
        x: Tensor = self._words(batch.token_ids)
        x += self._positions(batch.positions + first if first else batch.positions)
        if self._types is not None:
            x += self._types.table[0] if batch.token_types is None else self._types(batch.token_types)
        return self._norm(x)
