"""Qwen3 dense models (Qwen3ForCausalLM): queries and keys are normalized per head."""

from __future__ import annotations

from dataclasses import replace

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.families.llama import LlamaForCausalLM
from quire.services.worker.models.families.qwen2 import read_windows


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3: norms per head; biases by a flag; windows as in Qwen2."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json; biases of all attention projections by the flag attention_bias."""
        bias, windows = config.flag("attention_bias"), read_windows(config)
        attention = AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm=True)
        return replace(read_decoder(config), sliding_windows=windows, attention=attention)
