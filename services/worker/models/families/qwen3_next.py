"""Qwen3-Next (Qwen3NextForCausalLM): three gated delta rule layers for each gated attention layer.

All layers have a mixture of experts with a shared expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.attention.gated_attention import GatedAttention
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.recurrent.gated_delta_net import GatedDeltaNet
from quire.services.worker.layers.recurrent.layer import RecurrentConfig
from quire.services.worker.models.config.block_config import AttentionConfig, ScaleConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import read_rope
from quire.services.worker.models.families.qwen2_moe import read_qwen_experts
from quire.services.worker.models.mixture import MixtureForCausalLM, MixtureLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import LayerPlacement

RECURRENT, ATTENTION = "linear_attention", "full_attention"
ROTATED = 0.25  # default rotated fraction of a head


class Qwen3NextForCausalLM(MixtureForCausalLM):
    """Qwen3-Next: norm weights are offset by one, except in recurrent layers."""

    taped_functions: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json; by default a quarter of each head is rotated."""
        rope = read_rope(config, partial=True)
        section = config.section("rope_parameters") or ConfigFile({})
        if not section.has("partial_rotary_factor") and not config.has("partial_rotary_factor"):
            rope = replace(rope, share=ROTATED)
        decoder, bias = read_decoder(config, rope=rope), config.flag("attention_bias")
        experts = replace(
            read_qwen_experts(config),
            shared_intermediate_size=config.integer("shared_expert_intermediate_size"),
            shared_is_gated=True,
        )
        return replace(
            decoder,
            attention=AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm=True),
            scales=ScaleConfig(norm_offset=1.0),
            experts=experts,
            recurrent=_read_recurrent(config, decoder.num_layers),
        )

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> MixtureLayer:
        """Returns the layer at `index`: a mixture of experts after a gated delta net or after gated attention."""
        assert config.recurrent is not None
        name = f"model.layers.{index}"
        mixer: Attention | GatedDeltaNet = (
            GatedDeltaNet(f"{name}.linear_attn", config, place)
            if config.recurrent.layers[index]
            else GatedAttention(f"{name}.self_attn", config, 0, backend, place)
        )
        return MixtureLayer(index, config, backend, place, attention=mixer)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return "the single-row program does not support recurrent layers"

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names and prefixes to ignore, including multi-token prediction layers, which are not supported for this
        family."""
        return (*super().passed_over, "mtp.")


def _read_recurrent(config: ConfigFile, num_layers: int) -> RecurrentConfig:
    """Reads which layers are recurrent (by default three of four) and the sizes of their states.

    Raises InvalidArgument unless the layer types are known, one for each layer, and of both kinds.
    """
    kinds: Any = config.get("layer_types")
    if kinds is None:
        interval = config.integer("full_attention_interval", 4)
        kinds = [ATTENTION if (layer + 1) % interval == 0 else RECURRENT for layer in range(num_layers)]
    known = isinstance(kinds, list) and all(kind in (RECURRENT, ATTENTION) for kind in kinds)
    if not known or len(kinds) != num_layers or ATTENTION not in kinds or RECURRENT not in kinds:
        raise refusal(
            "layer_types", kinds, f"{num_layers} of {RECURRENT} and {ATTENTION} are needed, at least one of each"
        )
    keys, heads = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    if keys < 1 or heads < 1 or heads % keys:
        raise refusal("linear_num_key_heads", keys, f"must divide linear_num_value_heads, {heads}")
    width = config.integer("linear_conv_kernel_dim", 4)
    if width < 2:
        raise refusal("linear_conv_kernel_dim", width, "it must be 2 or more")
    return RecurrentConfig(
        num_key_heads=keys,
        num_heads=heads,
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        conv_width=width,
        layers=tuple(kind == RECURRENT for kind in kinds),
    )
