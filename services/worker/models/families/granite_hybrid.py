"""Granite 4.0-H (GraniteMoeHybridForCausalLM): state spaces in most layers, attention in some, often without positions.

A dense feed-forward runs for all tokens, alone or besides experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from quire.kernels.routing import Routing
from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.experts import SparseMLP, shared_expert_placement
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.recurrent.state_space import SpaceConfig, StateSpace
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.config.experts_config import ExpertsConfig, read_num_experts, read_top_k
from quire.services.worker.models.config.rope_config import NO_ROPE
from quire.services.worker.models.config.space_config import read_space
from quire.services.worker.models.families.granite import GraniteForCausalLM
from quire.services.worker.models.families.granite_moe import NAMES, WholeExperts
from quire.services.worker.models.families.llama import LlamaLayer
from quire.services.worker.models.mixture import MixtureForCausalLM, MixtureLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import LayerPlacement

RECURRENT, ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")


class GraniteHybridLayer(MixtureLayer):
    """Layer whose `shared_mlp` runs for every token; the only feed-forward without experts."""

    def __init__(self, index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> None:
        assert config.recurrent is not None
        name, hidden, experts = f"model.layers.{index}", config.hidden_size, config.experts
        mixer: Attention | StateSpace = (
            StateSpace(f"{name}.mamba", config, place)
            if config.recurrent.layers[index]
            else Attention(f"{name}.self_attn", config, 0, backend, place)
        )
        shared = MLP(
            f"{name}.shared_mlp",
            hidden,
            config.intermediate_size if experts is None else experts.shared_intermediate_size,
            False,
            place if experts is None else shared_expert_placement(place),
            fused=True,
            names=("input_linear", "output_linear"),
            scale=config.scales.residual,
            reduce_results=experts is None,
        )
        self.experts = None
        if experts is not None:
            whole = WholeExperts(f"{name}.{NAMES.module}", hidden, experts, place)
            self.experts = SparseMLP(f"{name}.{NAMES.module}", hidden, experts, place, whole, shared=shared)
        LlamaLayer.__init__(self, index, config, backend, place, attention=mixer, experts=self.experts or shared)
        self._defer_all_reduces(place)


class GraniteMoeHybridForCausalLM(MixtureForCausalLM):
    """Granite 4.0-H; the multipliers are folded into the weights."""

    scales_media: ClassVar[bool] = True

    taped_functions: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json: recurrent and attention layers, with or without experts and rotation.

        Raises InvalidArgument for an unknown position_embedding_type.
        """
        decoder = GraniteForCausalLM.read(config)
        kind = config.get("position_embedding_type")
        if kind not in (None, "nope", "rope"):
            raise refusal("position_embedding_type", kind, "supported: rope, nope")
        experts = _read_experts(config, decoder) if config.integer("num_local_experts", 8) else None
        return replace(
            decoder,
            rope=decoder.rope if kind == "rope" else NO_ROPE,
            feed_forward=replace(decoder.feed_forward, bias=False),
            intermediate_size=config.integer("shared_intermediate_size", 1024),
            experts=experts,
            recurrent=_read_recurrent(config, decoder),
        )

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> MixtureLayer:
        return GraniteHybridLayer(index, config, backend, place)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return "the single-row program does not support recurrent layers"


def _read_experts(config: ConfigFile, decoder: DecoderConfig) -> ExpertsConfig:
    """Returns the experts' configuration; the residual multiplier is folded into the routing weights."""
    num_experts = read_num_experts(config, "num_local_experts")
    return ExpertsConfig(
        num_experts,
        decoder.intermediate_size,
        Routing(read_top_k(config, num_experts), scale=decoder.scales.residual),
        sparse_layers=(True,) * decoder.num_layers,
        shared_intermediate_size=config.integer("shared_intermediate_size", 1024),
        by_expert=False,
        names=NAMES,
    )


def _read_recurrent(config: ConfigFile, decoder: DecoderConfig) -> SpaceConfig:
    """Reads which layers are recurrent and the sizes of their state spaces.

    Raises InvalidArgument unless the layer types are known, one for each layer, and of both kinds.
    """
    kinds: Any = config.get("layer_types") or config.get("layers_block_type")
    known = isinstance(kinds, list) and all(kind in (*RECURRENT, *ATTENTION) for kind in kinds)
    both = known and {kind in RECURRENT for kind in kinds} == {True, False}
    if not both or len(kinds) != decoder.num_layers:
        wanted = f"{decoder.num_layers} of {RECURRENT[0]} and {ATTENTION[0]} are needed, of both some"
        raise refusal("layer_types", kinds, wanted)
    values = config.integer("mamba_expand", 2) * decoder.hidden_size
    return read_space(config, values, tuple(kind in RECURRENT for kind in kinds))
