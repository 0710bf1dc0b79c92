"""Ministral 3 (Ministral3ForCausalLM): Mistral whose queries are scaled by their position beyond the original
context."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.families.llama import LlamaLayer
from quire.services.worker.models.families.mistral import MistralForCausalLM

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import LayerPlacement


@dataclass(frozen=True, slots=True)
class Ministral3Config(DecoderConfig):
    """Decoder configuration; queries at position p are scaled by 1 + growth * log(1 + p // step) (arXiv 2501.19399)."""

    growth: float = 0.0
    step: int = 1


class Ministral3Attention(Attention):
    """Attention whose queries are scaled by their position."""

    def __init__(self, index: int, config: Ministral3Config, backend: AttentionBackend, place: LayerPlacement) -> None:
        super().__init__(f"model.layers.{index}.self_attn", config, config.sliding_windows[index], backend, place)
        self._growth, self._step = config.growth, config.step

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Stores keys and values and returns the scaled queries."""
        q = super().store(x, batch, cache, cos_sin)
        steps = (batch.positions / self._step).floor()
        return (q * (steps.log1p() * self._growth + 1.0)[:, None, None]).to(q.dtype)


class Ministral3ForCausalLM(MistralForCausalLM):
    """Ministral 3: Mistral with a growing temperature of attention."""

    taped_functions: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def read(config: ConfigFile) -> Ministral3Config:
        """Reads config.json. Raises InvalidArgument for a scaling without the length of the original context."""
        decoder = MistralForCausalLM.read(config)
        rope = config.section("rope_parameters") or config.section("rope_scaling") or ConfigFile({})
        growth, step = rope.number("llama_4_scaling_beta", 0.0), rope.integer("original_max_position_embeddings", 0)
        if growth and step < 1:
            raise refusal("original_max_position_embeddings", step, "must be 1 or more with llama_4_scaling_beta")
        known = {item.name: getattr(decoder, item.name) for item in fields(decoder)}
        return Ministral3Config(**known, growth=growth, step=max(step, 1))

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> LlamaLayer:
        assert isinstance(config, Ministral3Config)
        attention = Ministral3Attention(index, config, backend, place)
        return LlamaLayer(index, config, backend, place, attention=attention)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return "the fused chain does not scale queries by their position"
