"""Qwen1.5-MoE and Qwen2-MoE (Qwen2MoeForCausalLM): small experts and a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.routing import Routing
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.experts_config import (
    ExpertsConfig,
    read_num_experts,
    read_sparse_layers,
    read_top_k,
)
from quire.services.worker.models.families.qwen2 import read_windows
from quire.services.worker.models.mixture import MixtureForCausalLM


def read_qwen_experts(config: ConfigFile) -> ExpertsConfig:
    """Reads sizes, routing and sparse layers of Qwen's experts, without a shared expert."""
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    renormalize = config.flag("norm_topk_prob")
    return ExpertsConfig(
        num_experts,
        config.integer("moe_intermediate_size"),
        Routing(read_top_k(config, num_experts), renormalize=renormalize),
        sparse_layers=read_sparse_layers(config),
    )


class Qwen2MoeForCausalLM(MixtureForCausalLM):
    """Qwen2-MoE: biases and windows as in Qwen2; some layers may be dense."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json with a gated shared expert; biases of queries, keys and values by default."""
        experts = replace(
            read_qwen_experts(config),
            shared_intermediate_size=config.integer("shared_expert_intermediate_size"),
            shared_is_gated=True,
        )
        attention, windows = AttentionConfig(qkv_bias=config.flag("qkv_bias", True)), read_windows(config)
        return replace(read_decoder(config), sliding_windows=windows, attention=attention, experts=experts)
