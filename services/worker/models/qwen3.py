"""Qwen3, dense (Qwen3ForCausalLM): queries and keys are normalised per head."""

from __future__ import annotations

from services.worker.models.config_file import ConfigFile
from services.worker.models.decoder_config import DecoderConfig, Traits, read_decoder
from services.worker.models.qwen2 import read_windows


def read(config: ConfigFile) -> DecoderConfig:
    bias = config.flag("attention_bias")
    return read_decoder(config, Traits(read_windows(config), qkv_bias=bias, o_bias=bias, qk_norm=True))
