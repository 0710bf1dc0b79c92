"""Mixtral (MixtralForCausalLM, arXiv 2401.04088): Mistral's blocks with two of eight experts per token."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.routing import Routing
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.experts_config import ExpertNames, ExpertsConfig, read_num_experts, read_top_k
from quire.services.worker.models.mixture import MixtureForCausalLM

NAMES = ExpertNames(module="block_sparse_moe", gate="w1", up="w3", down="w2")


class MixtralForCausalLM(MixtureForCausalLM):
    """Mixtral: experts in every layer; one window for all layers, or none."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json: experts in every layer, one window for all layers or none."""
        decoder, num_experts = read_decoder(config), read_num_experts(config, "num_local_experts")
        experts = ExpertsConfig(
            num_experts,
            decoder.intermediate_size,
            Routing(read_top_k(config, num_experts)),
            sparse_layers=(True,) * decoder.num_layers,
            names=NAMES,
        )
        windows = (config.integer("sliding_window", 0),) * decoder.num_layers
        return replace(decoder, sliding_windows=windows, experts=experts)
