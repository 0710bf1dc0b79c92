"""Common parts of mixture-of-experts families: Llama's blocks with routed experts in some or all layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.experts import SparseMLP
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.feed_forward.quantized_experts import experts_of
from quire.services.worker.models import single_row
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.families.llama import LlamaForCausalLM, LlamaLayer, Mixer

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import Alternative, LayerPlacement


class MixtureLayer(LlamaLayer):
    """Llama layer whose feed-forward may be a mixture of experts; `experts` is None for dense layers."""

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        backend: AttentionBackend,
        place: LayerPlacement,
        experts: SparseMLP | MLP | None = None,
        *,
        attention: Mixer | None = None,
    ) -> None:
        """Builds the layer of one index, with experts if the configuration says so.

        `experts`, `attention`: replace those of the configuration; an MLP makes the layer dense.
        """
        assert config.experts is not None
        self.experts = experts if isinstance(experts, SparseMLP) else None
        if experts is None and config.experts.sparse_layers[index]:
            name = f"model.layers.{index}.{config.experts.names.module}"
            stacked = experts_of(f"{name}.experts", config.hidden_size, config.experts, place)
            experts = self.experts = SparseMLP(name, config.hidden_size, config.experts, place, stacked)
        super().__init__(index, config, backend, place, attention=attention, experts=experts)
        self._defer_all_reduces(place)

    def _defer_all_reduces(self, place: LayerPlacement) -> None:
        """Leaves attention's all-reduce to expert dispatch, which combines it with its own exchange; nothing without
        dispatch."""
        if self.experts is not None and self.experts.dispatches:
            self.attention.defer_all_reduce()
            self.middle_norm.complete_all_reduce(place.shard.collectives)

    def _feed(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Adds attention's output to the residual and returns the feed-forward, with rows dispatched to their experts'
        ranks if the layer does so."""
        if self.experts is None or not self.experts.dispatches:
            return super()._feed(attended, residual)
        return self.experts.forward_dispatched(attended, residual, self.middle_norm)


class MixtureForCausalLM(LlamaForCausalLM):
    """Mixture-of-experts model; a family adds how its config.json is read."""

    taped_functions: ClassVar[tuple[str, ...]] = (*LlamaForCausalLM.taped_functions, "route", "experts")

    def __init__(
        self, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement, num_positions: int
    ) -> None:
        """Builds the layers and gives each mixture its row of the token counters `expert_counts`."""
        super().__init__(config, backend, place, num_positions)
        import torch  # lazy: families are also read without torch

        if config.experts is None:
            return  # a family with optional experts
        here = zip(self.here, self._mixture_layers, strict=True)
        sparse = {index: layer.experts for index, layer in here if layer.experts is not None}
        counts = torch.zeros(len(sparse), config.experts.num_experts, dtype=torch.int64, device=place.device)
        for experts, row in zip(sparse.values(), counts, strict=True):
            experts.load = row
        self.expert_counts = counts, tuple(sparse)
        self.sparse_layers = tuple(sparse.values())

    @property
    def _mixture_layers(self) -> Iterator[MixtureLayer]:
        for layer in self.layers:
            assert isinstance(layer, MixtureLayer)
            yield layer

    @staticmethod
    @abstractmethod
    def read(config: ConfigFile) -> DecoderConfig: ...

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> MixtureLayer:
        return MixtureLayer(index, config, backend, place)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        assert config.experts is not None
        return single_row.reject_reason(config, place) or single_row.experts_reject_reason(config.experts, place.shard)

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of checkpoint tensors to ignore, including the experts of other ranks."""
        layers = (layer.experts for layer in self._mixture_layers if layer.experts is not None)
        return (*super().passed_over, *(name for experts in layers for name in experts.experts.absent))

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        """Stacked tensors of all experts, by name, that checkpoints may have in place of one per expert."""
        return {
            name: alternative
            for layer in self._mixture_layers
            if layer.experts is not None
            for name, alternative in layer.experts.alternatives.items()
        }
