"""Granite 3 and 4's dense models (GraniteForCausalLM): Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.families.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """The multipliers become part of the weights."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        divisor = config.number("logits_scaling", 1.0)
        if divisor == 0:
            raise refusal("logits_scaling", divisor, "logits are divided by it")
        return replace(
            LlamaForCausalLM.read(config),
            embedding_scale=config.number("embedding_multiplier", 1.0),
            residual_scale=config.number("residual_multiplier", 1.0),
            attention_scale=config.number("attention_multiplier", 1.0),
            logit_scale=1.0 / divisor,
        )
