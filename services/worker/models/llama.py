"""Llama 1 to 3 (LlamaForCausalLM)."""

from __future__ import annotations

from services.worker.models.config_file import ConfigFile
from services.worker.models.decoder_config import DecoderConfig, Traits, no_windows, read_decoder


def read(config: ConfigFile) -> DecoderConfig:
    bias = config.flag("attention_bias")
    traits = Traits(no_windows(config), qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias"))
    return read_decoder(config, traits)
