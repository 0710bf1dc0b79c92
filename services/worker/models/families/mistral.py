"""Mistral (MistralForCausalLM): Llama with an optional sliding window in all layers."""

from __future__ import annotations

from dataclasses import replace

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.families.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: one window for all layers, or none."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        decoder = read_decoder(config)
        return replace(decoder, sliding_windows=(config.integer("sliding_window", 0),) * decoder.num_layers)
