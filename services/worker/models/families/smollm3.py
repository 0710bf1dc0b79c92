"""SmolLM3 (SmolLM3ForCausalLM): Llama without rotation in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.config.rope_config import NO_ROPE
from quire.services.worker.models.families.llama import LlamaForCausalLM
from quire.services.worker.models.families.qwen2 import read_windows

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import LayerPlacement


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """SmolLM3; `no_rope_layers` is 1 for layers that rotate."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json: by default every fourth layer has no rotation. Raises InvalidArgument if `no_rope_layers`
        has a wrong length."""
        decoder = LlamaForCausalLM.read(config)
        every = config.integer("no_rope_layer_interval", 4)
        rotating = config.get("no_rope_layers", [(i + 1) % every != 0 for i in range(decoder.num_layers)])
        if len(rotating) != decoder.num_layers:
            raise refusal("no_rope_layers", rotating, f"{decoder.num_layers} layers need as many entries")
        ropes = tuple(decoder.rope if rotates else NO_ROPE for rotates in rotating)
        return replace(decoder, ropes=ropes, sliding_windows=read_windows(config))

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return "its layers encode positions in two ways"
