"""GLM-4 (GlmForCausalLM, Glm4ForCausalLM): half of each head is rotated, in neighbouring pairs.

The 0414 models have four norms a layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import read_rope
from quire.services.worker.models.families.llama import LlamaForCausalLM
from quire.services.worker.models.sandwich import NormNames, SandwichLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import LayerPlacement

NORMS = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def read_glm(config: ConfigFile) -> DecoderConfig:
    """Reads config.json of GLM-4: half of each head is rotated in neighbouring pairs; gate and up projections are one
    tensor."""
    rope = replace(
        read_rope(ConfigFile({"partial_rotary_factor": 0.5, **config.values}), partial=True), interleaved=True
    )
    decoder = read_decoder(config, rope=rope)
    attention = AttentionConfig(qkv_bias=config.flag("attention_bias"))
    return replace(decoder, attention=attention, feed_forward=replace(decoder.feed_forward, fused=True))


class GlmForCausalLM(LlamaForCausalLM):
    """GLM-4 models of 2024, with Llama's layers: two norms each."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        return read_glm(config)


class Glm4ForCausalLM(CausalLM):
    """GLM-4 models of 2025 (0414), with four norms a layer."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        return read_glm(config)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> SandwichLayer:
        return SandwichLayer(index, config, NORMS, backend, place)
