"""Gemma 2 (Gemma2ForCausalLM, arXiv 2408.00118): windows in every other layer; soft-capped scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.families.gemma import read_gemma
from quire.services.worker.models.families.gemma3 import NORMS, WINDOWED, read_kinds
from quire.services.worker.models.sandwich import SandwichLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import LayerPlacement


class Gemma2ForCausalLM(CausalLM):
    """Gemma 2: norms before and after attention and feed-forward."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json: windows in every other layer, from the first on, soft caps, and a softmax scale from
        query_pre_attn_scalar."""
        decoder = read_gemma(config)
        kinds = read_kinds(ConfigFile({"sliding_window_pattern": 2, **config.values}), decoder.num_layers)
        window = config.integer("sliding_window", 4096)
        return replace(
            decoder,
            attention=replace(
                decoder.attention,
                softcap=_cap(config, "attn_logit_softcapping", 50.0),
                scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
            ),
            scales=replace(decoder.scales, logit_cap=_cap(config, "final_logit_softcapping", 30.0)),
            sliding_windows=tuple(window if kind == WINDOWED else 0 for kind in kinds),
        )

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> SandwichLayer:
        return SandwichLayer(index, config, NORMS, backend, place)


def _cap(config: ConfigFile, key: str, default: float) -> float:
    """Reads a soft cap; an explicit null means none (0.0), a missing field the default. Raises InvalidArgument for 0
    and below."""
    if key in config.values and not config.has(key):
        return 0.0
    cap = config.number(key, default)
    if cap <= 0:
        raise refusal(key, cap, "a cap is over 0")
    return cap
