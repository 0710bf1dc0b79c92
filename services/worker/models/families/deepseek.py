"""DeepSeek V2 and V3 (DeepseekV2ForCausalLM, arXiv 2405.04434; DeepseekV3ForCausalLM, arXiv 2412.19437).

Latent attention, group-limited routing, shared experts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.kernels.routing import Routing
from quire.services.worker.attention.port import LatentBackend
from quire.services.worker.layers.attention.latent_attention import LatentAttention, LatentConfig
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.experts_config import ExpertNames, ExpertsConfig, read_num_experts, read_top_k
from quire.services.worker.models.config.rope_config import read_rope
from quire.services.worker.models.mixture import MixtureForCausalLM, MixtureLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import LayerPlacement

NAMES = ExpertNames(shared="shared_experts")
METHODS = ("greedy", "group_limited_greedy")
MOST_NEXT_LAYERS = 128  # the limit of draft tokens


class DeepseekForCausalLM(MixtureForCausalLM):
    """Common parts of V2 and V3; the first layers may be dense."""

    taped_functions: ClassVar[tuple[str, ...]] = (
        *(name for name in MixtureForCausalLM.taped_functions if name != "qk_norm_rope_store"),
        "latent_store",
        "head_linear",
        "latent_attention",
    )

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> MixtureLayer:
        """Returns the layer at `index` with latent attention, which `backend` must support."""
        assert isinstance(backend, LatentBackend), "chosen for this model"
        attention = LatentAttention(f"model.layers.{index}.self_attn", config, backend, place)
        return MixtureLayer(index, config, backend, place, attention=attention)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return "the single-row program does not support latent attention"


class DeepseekV2ForCausalLM(DeepseekForCausalLM):
    """V2: softmax over all experts; a group is ranked by its best expert."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads V2's config.json. Raises InvalidArgument for renormalized routing weights and unknown methods of
        routing."""
        method = config.get("topk_method", "greedy")
        if method not in METHODS:
            raise refusal("topk_method", method, f"supported: {', '.join(METHODS)}")
        if config.flag("norm_topk_prob"):
            raise refusal("norm_topk_prob", True, "it is not supported for this family")
        routing = Routing(_top_k(config), renormalize=False, scale=config.number("routed_scaling_factor", 1.0))
        if method != "greedy":
            routing = _grouped(routing, config, group_top=1)
        return _read(config, routing, interleaved=True)


class DeepseekV3ForCausalLM(DeepseekForCausalLM):
    """V3: sigmoid per expert, score correction bias; a group is ranked by its two best experts."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads V3's config.json, including the number of multi-token prediction layers, 0 to MOST_NEXT_LAYERS."""
        scale, renormalize = config.number("routed_scaling_factor", 2.5), config.flag("norm_topk_prob", True)
        routing = Routing(_top_k(config), scoring="sigmoid", renormalize=renormalize, scale=scale)
        decoder = _read(
            config, _grouped(routing, config, group_top=2), interleaved=config.flag("rope_interleave", True)
        )
        assert decoder.experts is not None
        behind = config.integer("num_nextn_predict_layers", 0)
        if not 0 <= behind <= MOST_NEXT_LAYERS:
            raise refusal("num_nextn_predict_layers", behind, f"must be 0 to {MOST_NEXT_LAYERS}")
        return replace(decoder, experts=replace(decoder.experts, score_correction_bias=True), num_next_layers=behind)

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names and prefixes to ignore, including the multi-token prediction layers, which a drafter may load
        (spec_decode/methods/mtp.py)."""
        first, count = self.config.num_layers, self.config.num_next_layers
        return (*super().passed_over, *(f"model.layers.{index}." for index in range(first, first + count)))


def _num_experts(config: ConfigFile) -> int:
    return read_num_experts(config, "n_routed_experts", "num_experts", "num_local_experts")


def _top_k(config: ConfigFile) -> int:
    return read_top_k(config, _num_experts(config))


def _grouped(routing: Routing, config: ConfigFile, *, group_top: int) -> Routing:
    """Returns `routing` limited to the best groups of experts, ranked by the sum of their `group_top` best scores.

    Raises InvalidArgument if the groups do not divide the experts or leave a token too few of them.
    """
    groups, top = config.integer("n_group", 1), config.integer("topk_group", 1)
    if groups < 1 or _num_experts(config) % groups:
        raise refusal("n_group", groups, f"must divide the number of experts, {_num_experts(config)}")
    size = _num_experts(config) // groups
    if not 1 <= top <= groups or top * size < routing.top_k or size < group_top:
        raise refusal("topk_group", top, f"of {groups} groups of {size} experts a token takes {routing.top_k}")
    return replace(routing, num_groups=groups, top_groups=top, group_top=group_top)


def _read(config: ConfigFile, routing: Routing, *, interleaved: bool) -> DecoderConfig:
    """Reads the fields that V2 and V3 share: latent attention, experts, the softmax scale.

    num_kv_heads is 1, because one latent vector per token is cached for all heads.
    """
    latent = LatentConfig(
        q_rank=config.integer("q_lora_rank", 0),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    if latent.rope_dim % 2:
        raise refusal("qk_rope_head_dim", latent.rope_dim, "it must be even")
    rope = replace(read_rope(config), share=1.0, interleaved=interleaved)
    decoder = read_decoder(config, rope=rope)
    bias, scale = config.flag("attention_bias"), head_dim**-0.5 * _scale_of_long_contexts(config) ** 2
    return replace(
        decoder,
        head_dim=head_dim,
        num_kv_heads=1,
        attention=AttentionConfig(qkv_bias=bias, o_bias=bias, scale=scale),
        latent=latent,
        experts=_experts(config, routing, decoder.num_layers),
    )


def _experts(config: ConfigFile, routing: Routing, num_layers: int) -> ExpertsConfig:
    """Returns the experts' configuration; the first `first_k_dense_replace` layers are dense."""
    size, dense = config.integer("moe_intermediate_size"), config.integer("first_k_dense_replace", 0)
    return ExpertsConfig(
        _num_experts(config),
        size,
        routing,
        sparse_layers=tuple(layer >= dense for layer in range(num_layers)),
        shared_intermediate_size=size * config.integer("n_shared_experts", 0),
        names=NAMES,
    )


def _scale_of_long_contexts(config: ConfigFile) -> float:
    """Returns YaRN's factor of the softmax scale, to be applied to queries and keys each; 1.0 without an extended
    context.

    DeepSeek applies a part of YaRN's scale to the scores (mscale_all_dim) and the rest to the rotation.
    """
    section = config.section("rope_parameters") or config.section("rope_scaling") or ConfigFile({})
    kind = section.get("rope_type") or section.get("type") or "default"
    factor, share = section.number("factor", 1.0), section.number("mscale_all_dim", 0.0)
    return 1.0 if kind == "default" or not share or factor <= 1 else 0.1 * share * math.log(factor) + 1.0
