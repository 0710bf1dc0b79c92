"""RoBERTa (arXiv 1907.11692) and XLM-RoBERTa: BERT with positions that start after the padding token's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.pooled_classifier import PooledClassifier
from quire.services.worker.models.encoders.bert import Bert
from quire.services.worker.models.encoders.encoder_config import EncoderConfig, read_encoder

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import LayerPlacement

HEAD = ("bias", "dense.weight", "dense.bias", "layer_norm.weight", "layer_norm.bias", "decoder.weight", "decoder.bias")


class Roberta(Bert):
    """RoBERTa; its classifier has a dense layer instead of BERT's pooler."""

    base: ClassVar[str] = "roberta"
    unused: ClassVar[tuple[str, ...]] = ("roberta.embeddings.position_ids", *(f"lm_head.{name}" for name in HEAD))

    @staticmethod
    def read(config: ConfigFile) -> EncoderConfig:
        """Reads config.json: positions start after the padding token's row, which shortens the longest prompt."""
        encoder = read_encoder(config)
        first = config.integer("pad_token_id", 1) + 1
        if encoder.max_positions <= first:
            raise refusal("max_position_embeddings", encoder.max_positions, f"positions begin at {first}")
        return replace(
            encoder,
            num_token_types=config.integer("type_vocab_size", 1),
            first_position=first,
            max_positions=encoder.max_positions - first,
        )

    @classmethod
    def classifier_of(cls, config: EncoderConfig, place: LayerPlacement) -> PooledClassifier:
        return PooledClassifier("classifier.dense", "classifier.out_proj", config, place)
