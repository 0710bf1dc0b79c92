"""Granite 3 and 4 dense models (GraniteForCausalLM): Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.config.block_config import ScaleConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.families.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """Granite; the multipliers are folded into the weights."""

    scales_media: ClassVar[bool] = True

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json with the multipliers of scores, embedding, residual updates and logits. Raises
        InvalidArgument if logits are divided by 0."""
        divisor = config.number("logits_scaling", 1.0)
        if divisor == 0:
            raise refusal("logits_scaling", divisor, "it must not be 0, because logits are divided by it")
        decoder = LlamaForCausalLM.read(config)
        return replace(
            decoder,
            attention=replace(decoder.attention, scale=config.number("attention_multiplier", 1.0)),
            scales=ScaleConfig(
                embedding=config.number("embedding_multiplier", 1.0),
                residual=config.number("residual_multiplier", 1.0),
                logit=1.0 / divisor,
            ),
        )
