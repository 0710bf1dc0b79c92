"""Mistral (MistralForCausalLM): Llama whose layers may all look back over a sliding window only."""

from __future__ import annotations

from services.worker.models.config_file import ConfigFile
from services.worker.models.decoder_config import DecoderConfig, Traits, read_decoder


def read(config: ConfigFile) -> DecoderConfig:
    windows = (config.integer("sliding_window", 0),) * config.integer("num_hidden_layers")
    return read_decoder(config, Traits(windows))
