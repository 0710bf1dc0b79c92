"""Phi-3 and Phi-4 (Phi3ForCausalLM): Llama with fused projections, LongRoPE and partial rotation."""

from __future__ import annotations

from dataclasses import replace

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import read_rope
from quire.services.worker.models.families.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3: one window for all layers, or none."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json: fused checkpoint tensors, partial rotation, one window for all layers or none."""
        decoder = read_decoder(config, rope=read_rope(config, partial=True))
        windows = (config.integer("sliding_window", 0),) * decoder.num_layers
        attention, feed_forward = AttentionConfig(fused_qkv=True), replace(decoder.feed_forward, fused=True)
        return replace(decoder, sliding_windows=windows, attention=attention, feed_forward=feed_forward)
