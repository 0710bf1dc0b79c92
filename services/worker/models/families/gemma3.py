"""Gemma 3's text models (Gemma3ForCausalLM): five layers with a window for each one with full attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.config.rope_config import RopeConfig, read_section
from quire.services.worker.models.families.gemma import read_gemma
from quire.services.worker.models.sandwich import NormNames, SandwichLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import LayerPlacement

NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
FULL, WINDOWED = "full_attention", "sliding_attention"


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3: queries and keys are normalized per head; layers with a window have their own rotary base."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json: windows in five of six layers, with a rotary base of their own. Raises InvalidArgument for
        soft caps."""
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.has(cap):
                raise refusal(cap, config.get(cap), "Gemma 3 has none")
        full, local = read_ropes(config)
        decoder = read_gemma(config, full)
        kinds, window = read_kinds(config, decoder.num_layers), config.integer("sliding_window", 4096)
        scale = config.number("query_pre_attn_scalar", 256) ** -0.5
        return replace(
            decoder,
            attention=replace(decoder.attention, qk_norm=True, scale=scale),
            sliding_windows=tuple(window if kind == WINDOWED else 0 for kind in kinds),
            ropes=tuple(local if kind == WINDOWED else full for kind in kinds),
        )

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> SandwichLayer:
        return SandwichLayer(index, config, NORMS, backend, place)


def read_ropes(config: ConfigFile) -> tuple[RopeConfig, RopeConfig]:
    """Reads the rotary configurations of full-attention layers and of layers with a window, in the notation of
    transformers 5 or earlier."""
    by_kind = config.section("rope_parameters")
    if by_kind is not None and by_kind.has(FULL):
        return tuple(read_section(by_kind.section(kind) or ConfigFile({}), config) for kind in (FULL, WINDOWED))  # type: ignore[return-value]
    scaling = dict((config.section("rope_scaling") or ConfigFile({})).values)
    full = read_section(ConfigFile({"rope_theta": config.number("rope_theta", 1e6), **scaling}), config)
    return full, RopeConfig(config.number("rope_local_base_freq", 10_000.0))


def read_kinds(config: ConfigFile, num_layers: int) -> list[str]:
    """Returns each layer's attention type, FULL or WINDOWED: layer_types, else FULL in every `sliding_window_pattern`th
    layer.

    Raises InvalidArgument for unknown types or a wrong number of them.
    """
    pattern = config.integer("sliding_window_pattern", 6)
    kinds = config.get("layer_types", [WINDOWED if (i + 1) % pattern else FULL for i in range(num_layers)])
    if len(kinds) != num_layers or not set(kinds) <= {FULL, WINDOWED}:
        raise refusal("layer_types", kinds, f"{FULL} or {WINDOWED} is needed for each of {num_layers} layers")
    return list(kinds)
