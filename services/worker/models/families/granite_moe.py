"""Granite 3 mixtures of experts (GraniteMoeForCausalLM): Granite's multipliers, stacked expert tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.kernels.routing import Routing
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.experts import Experts, SparseMLP
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.config.experts_config import ExpertNames, ExpertsConfig, read_num_experts, read_top_k
from quire.services.worker.models.families.granite import GraniteForCausalLM
from quire.services.worker.models.mixture import MixtureForCausalLM, MixtureLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement

NAMES = ExpertNames(module="block_sparse_moe", router="router.layer", gate="input_linear", down="output_linear")


class WholeExperts(Experts):
    """Experts whose checkpoint has one tensor of all experts, in the memory layout of this layer: gates and ups, and
    downs."""

    takes_adapters = False

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.{self._names.gate}.weight", self._all_gates_and_ups()
        yield f"{self._name}.{self._names.down}.weight", self._all_downs()

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}


class GraniteMoeForCausalLM(MixtureForCausalLM):
    """Granite MoE: experts in every layer; the residual multiplier is folded into the routing weights."""

    scales_media: ClassVar[bool] = True

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json; the residual multiplier becomes the scale of the routing weights."""
        decoder, num_experts = GraniteForCausalLM.read(config), read_num_experts(config, "num_local_experts")
        experts = ExpertsConfig(
            num_experts,
            decoder.intermediate_size,
            Routing(read_top_k(config, num_experts), scale=decoder.scales.residual),
            sparse_layers=(True,) * decoder.num_layers,
            by_expert=False,
            names=NAMES,
        )
        return replace(decoder, experts=experts)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> MixtureLayer:
        """Returns the layer at `index`, whose experts are stacked in the checkpoint."""
        assert config.experts is not None
        name = f"model.layers.{index}.{NAMES.module}"
        whole = WholeExperts(name, config.hidden_size, config.experts, place)
        experts = SparseMLP(name, config.hidden_size, config.experts, place, whole)
        return MixtureLayer(index, config, backend, place, experts)
