"""OLMoE (OlmoeForCausalLM, arXiv 2409.02060): query and key norms over all heads, many small experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.kernels.routing import Routing
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.experts_config import ExpertsConfig, read_num_experts, read_top_k
from quire.services.worker.models.families.olmo2 import Olmo2Attention
from quire.services.worker.models.mixture import MixtureForCausalLM, MixtureLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import LayerPlacement


class OlmoeForCausalLM(MixtureForCausalLM):
    """OLMoE: no windows; biases by a flag."""

    taped_functions: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json. Raises InvalidArgument for clipped queries, keys and values (clip_qkv)."""
        if config.has("clip_qkv"):
            raise refusal("clip_qkv", config.get("clip_qkv"), "clipping of queries, keys and values is not supported")
        decoder, num_experts = read_decoder(config), read_num_experts(config, "num_experts", "num_local_experts")
        experts = ExpertsConfig(
            num_experts,
            decoder.intermediate_size,
            Routing(read_top_k(config, num_experts), renormalize=config.flag("norm_topk_prob")),
            sparse_layers=(True,) * decoder.num_layers,
        )
        bias = config.flag("attention_bias")
        return replace(decoder, attention=AttentionConfig(qkv_bias=bias, o_bias=bias), experts=experts)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> MixtureLayer:
        attention = Olmo2Attention(f"model.layers.{index}.self_attn", config, backend, place)
        return MixtureLayer(index, config, backend, place, attention=attention)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return "the single-row program normalizes queries and keys per head"
