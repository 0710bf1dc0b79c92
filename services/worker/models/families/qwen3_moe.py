"""Qwen3 mixtures of experts (Qwen3MoeForCausalLM, arXiv 2505.09388): Qwen3's blocks without a shared expert."""

from __future__ import annotations

from dataclasses import replace

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.families.qwen2_moe import read_qwen_experts
from quire.services.worker.models.families.qwen3 import Qwen3ForCausalLM
from quire.services.worker.models.mixture import MixtureForCausalLM


class Qwen3MoeForCausalLM(MixtureForCausalLM):
    """Qwen3-MoE: norms per head; some layers may be dense."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        return replace(Qwen3ForCausalLM.read(config), experts=read_qwen_experts(config))
