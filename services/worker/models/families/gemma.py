"""Gemma (GemmaForCausalLM): Llama with GELU gates, norm weights offset by one and scaled embeddings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.activation import GELU_TANH
from quire.services.worker.models.config.block_config import AttentionConfig, FeedForwardConfig, ScaleConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import RopeConfig
from quire.services.worker.models.families.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import LayerPlacement


def read_gemma(config: ConfigFile, rope: RopeConfig | None = None) -> DecoderConfig:
    """Reads the fields that all Gemma generations share: tanh-GELU gates, embeddings scaled by sqrt(hidden_size), norm
    weights offset by 1.

    `rope`: as read by the family; None: read here.
    """
    exact = "gelu" if not config.has("hidden_activation") else None  # the first config.json files meant the tanh form
    decoder = read_decoder(config, rope=rope, activations=(*GELU_TANH, *filter(None, [exact])))
    bias = config.flag("attention_bias")
    return replace(
        decoder,
        feed_forward=FeedForwardConfig(GELU_TANH[0]),
        scales=ScaleConfig(embedding=math.sqrt(decoder.hidden_size), norm_offset=1.0),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        attention=AttentionConfig(qkv_bias=bias, o_bias=bias),
    )


class GemmaForCausalLM(LlamaForCausalLM):
    """Gemma of the first generation: Llama's layers with another activation and scales; neither taped nor in fused
    kernels."""

    taped_functions: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        return read_gemma(config)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return "the single-row program supports SiLU only"
