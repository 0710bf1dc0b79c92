"""Llama 4's text models (Llama4ForCausalLM): most layers attend within chunks of positions.

The other layers have full attention without rotation and scale queries with the position. Each token uses one routed
and one shared expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from quire.kernels.routing import Routing
from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.experts import Experts, SparseMLP
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.feed_forward.quantized_experts import QuantizedExperts, experts_of
from quire.services.worker.layers.sharding import shifted
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.experts_config import ExpertNames, ExpertsConfig, read_num_experts, read_top_k
from quire.services.worker.models.config.rope_config import NO_ROPE, read_rope
from quire.services.worker.models.mixture import MixtureForCausalLM, MixtureLayer

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement

NAMES = ExpertNames(module="feed_forward", router="router")
FULL, CHUNKED = "full_attention", "chunked_attention"
LEAST_CHUNK = 2  # one token and its predecessor
DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "intermediate_size_mlp": 16_384}
DEFAULT_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Scales queries at position p by 1 + growth * log(1 + (p + 1) // step) (arXiv 2501.19399)."""

    growth: float
    step: int


@dataclass(frozen=True, slots=True)
class Llama4Config(DecoderConfig):
    """Decoder configuration with the fields of this family's attention."""

    unit_queries: bool = False  # in rotating layers, queries and keys are normalized to a mean square of 1
    temperature: AttentionTemperature | None = None  # in layers without rotation


class Llama4Attention(Attention):
    """Attention within chunks of positions, or full attention without rotation; may normalize rotated queries and keys
    without weights.

    Rotation preserves lengths, so the kernels' norm before it equals the reference's norm after it.
    """

    def __init__(self, index: int, config: Llama4Config, backend: AttentionBackend, place: LayerPlacement) -> None:
        super().__init__(f"model.layers.{index}.self_attn", config, config.sliding_windows[index], backend, place)
        rotates = config.ropes[index] != NO_ROPE
        self._ones = place.empty(config.head_dim) if rotates and config.unit_queries else None
        self._temperature = None if rotates else config.temperature

    def finish(self) -> None:
        super().finish()
        if self._ones is not None:
            self._ones.fill_(1.0)

    @property
    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None]:
        return self._ones, self._ones

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Stores keys and values and returns the queries, in layers without rotation scaled by their position."""
        q, temperature = super().store(x, batch, cache, cos_sin), self._temperature
        if temperature is None:
            return q
        steps = ((batch.positions + 1.0) / temperature.step).floor()
        return (q * (steps.log1p() * temperature.growth + 1.0)[:, None, None]).to(q.dtype)

    def _attended(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends to the positions from the start of the token's chunk on, or to all if the layer has no chunks."""
        chunk, scale = self._window, self._scale
        return self._backend.attend(q, cache.k, cache.v, metadata, scale=scale, window=chunk, chunked=chunk > 0)


class Llama4Experts(Experts):
    """Experts whose checkpoint stacks all of them in one tensor, input features before output features, gates before
    ups."""

    inputs_first = True

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        both = (self._features, shifted(self._features, self._total))
        gates_and_ups, downs = (tensor.transpose(1, 2) for tensor in (self._gate_up, self._down))
        yield f"{self._name}.gate_up_proj", self._stacked_destination(gates_and_ups, 2, both, 2 * self._total)
        yield f"{self._name}.down_proj", self._stacked_destination(downs, 1, (self._features,), self._total)

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}


class Llama4MLP(SparseMLP):
    """Mixture whose routing weight scales the expert's input, not its output."""

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes each token to one expert and returns the scaled inputs, the expert ids and weights of 1."""
        import torch

        _, ids, weights = super()._routed(x)
        return x * weights.to(x.dtype), ids, torch.ones_like(weights)


class Llama4ForCausalLM(MixtureForCausalLM):
    """Llama 4; some layers may be dense, with a feed-forward of another size."""

    taped_functions: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def read(config: ConfigFile) -> Llama4Config:
        """Reads config.json: rotating layers, chunks, temperature and experts. Raises InvalidArgument for ropes that
        stretch normalized queries."""
        given = {key: value for key, value in config.values.items() if value is not None}
        file = ConfigFile({**DEFAULTS, **given})
        unit_queries, rope = file.flag("use_qk_norm", True), replace(read_rope(file), interleaved=True)
        if unit_queries and rope.attention_factor != 1:
            raise refusal(
                "rope_type",
                rope.kind,
                "it scales queries and keys, which are normalized afterwards; it is not supported",
            )
        decoder, bias = read_decoder(file, rope=rope), file.flag("attention_bias")
        rotating = _read_rotating(file, decoder.num_layers)
        decoder = replace(
            decoder,
            intermediate_size=file.integer("intermediate_size_mlp"),
            sliding_windows=_read_chunks(config, rotating),
            ropes=tuple(rope if rotates else NO_ROPE for rotates in rotating),
            attention=AttentionConfig(qkv_bias=bias, o_bias=bias, chunked_windows=True),
            experts=_read_experts(file, decoder),
        )
        known = {item.name: getattr(decoder, item.name) for item in fields(decoder)}
        return Llama4Config(**known, unit_queries=unit_queries, temperature=_read_temperature(file))

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> MixtureLayer:
        """Returns the layer at `index`, with experts or with a dense feed-forward of another size."""
        assert isinstance(config, Llama4Config)
        assert config.experts is not None
        name, size = f"model.layers.{index}.{NAMES.module}", config.hidden_size
        feed: SparseMLP | MLP
        if config.experts.sparse_layers[index]:
            feed = Llama4MLP(name, size, config.experts, place, _experts(f"{name}.experts", config, place))
        else:
            feed = MLP(name, size, config.intermediate_size, False, place, activation=config.feed_forward.activation)
        attention = Llama4Attention(index, config, backend, place)
        return MixtureLayer(index, config, backend, place, feed, attention=attention)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return "the single-row program supports neither chunks nor experts with weighted inputs"


def _experts(name: str, config: Llama4Config, place: LayerPlacement) -> Experts:
    """Returns the experts in the checkpoint's layout: one tensor each if they are quantized, else stacked in one."""
    assert config.experts is not None
    if place.checkpoint is not None:
        found = experts_of(name, config.hidden_size, config.experts, place)
        if isinstance(found, QuantizedExperts):
            return found
    return Llama4Experts(name, config.hidden_size, config.experts, place)


def _read_rotating(config: ConfigFile, num_layers: int) -> list[bool]:
    """Returns by layer whether it rotates: `no_rope_layers` is 1 for layers that do; missing or empty: all but every
    `no_rope_layer_interval`th.

    Raises InvalidArgument for other values than 0 and 1 and for too few of them.
    """
    every = config.integer("no_rope_layer_interval", 4)
    if every < 1:
        raise refusal("no_rope_layer_interval", every, "must be 1 or more")
    rotating = config.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(rotating, list) or len(rotating) < num_layers or not set(rotating) <= {0, 1}:
        raise refusal("no_rope_layers", rotating, f"0 or 1 is needed for each of {num_layers} layers")
    return [bool(rotates) for rotates in rotating[:num_layers]]


def _read_chunks(config: ConfigFile, rotating: list[bool]) -> tuple[int, ...]:
    """Returns each layer's chunk length in tokens, 0 for full attention: by layer_types, else in rotating layers.

    An explicit null means no chunks, a missing field DEFAULT_CHUNK. Raises InvalidArgument for unknown types and too
    short chunks.
    """
    none = "attention_chunk_size" in config.values and not config.has("attention_chunk_size")
    chunk = 0 if none else config.integer("attention_chunk_size", DEFAULT_CHUNK)
    kinds: Any = config.get("layer_types", [CHUNKED if rotates and not none else FULL for rotates in rotating])
    known = isinstance(kinds, list) and all(kind in (CHUNKED, FULL) for kind in kinds)
    if not known or len(kinds) != len(rotating):
        raise refusal("layer_types", kinds, f"{CHUNKED} or {FULL} is needed for each of {len(rotating)} layers")
    if CHUNKED in kinds and chunk < LEAST_CHUNK:
        raise refusal("attention_chunk_size", config.get("attention_chunk_size"), f"must be {LEAST_CHUNK} or more")
    return tuple(chunk if kind == CHUNKED else 0 for kind in kinds)


def _read_experts(config: ConfigFile, decoder: DecoderConfig) -> ExpertsConfig:
    """Returns the experts' configuration. Raises InvalidArgument unless a token uses exactly one routed expert."""
    num_experts, size = read_num_experts(config, "num_local_experts"), config.integer("intermediate_size")
    top_k = read_top_k(config, num_experts)
    if top_k != 1:
        raise refusal("num_experts_per_tok", top_k, "it must be 1")
    return ExpertsConfig(
        num_experts,
        size,
        Routing(top_k, scoring="sigmoid", renormalize=False),
        sparse_layers=_read_sparse_layers(config, decoder.num_layers),
        shared_intermediate_size=size,
        by_expert=decoder.quantization is not None,
        names=NAMES,
    )


def _read_sparse_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Returns by layer whether it has experts: `moe_layers`, else every `interleave_moe_layer_step`th.

    Raises InvalidArgument for a step below 1 and for indices that are no layers.
    """
    step = config.integer("interleave_moe_layer_step", 1)
    if step < 1:
        raise refusal("interleave_moe_layer_step", step, "must be 1 or more")
    sparse: Any = config.get("moe_layers", list(range(step - 1, num_layers, step)))
    if not isinstance(sparse, list) or not all(layer in range(num_layers) for layer in sparse):
        raise refusal("moe_layers", sparse, f"a list of layers, 0 to {num_layers - 1}, is needed")
    return tuple(layer in sparse for layer in range(num_layers))


def _read_temperature(config: ConfigFile) -> AttentionTemperature | None:
    """Reads the scaling of queries by position, or None if attn_temperature_tuning is off.

    The switch is a number in some files. Raises InvalidArgument for other values and for a step below 1.
    """
    tuned = config.get("attn_temperature_tuning", True)
    if not isinstance(tuned, int):
        raise refusal("attn_temperature_tuning", tuned, "true or false is needed")
    step = config.integer("floor_scale", 8192)
    if step < 1:
        raise refusal("floor_scale", step, "must be 1 or more")
    return AttentionTemperature(config.number("attn_scale", 0.1), step) if tuned else None
