"""Falcon-H1 (FalconH1ForCausalLM): attention and a state space in parallel in each layer (arXiv 2507.22448)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.linear import by_rows
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.recurrent.state_space import SpaceConfig, SpaceScales, StateSpace
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.block_config import AttentionConfig, ScaleConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.space_config import read_space
from quire.services.worker.models.decoder_layer import DecoderLayer, normed

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import LayerPlacement

DEFAULT_VALUES = 1024  # default of the state space's inner size
OF_FEED_FORWARD, OF_SPACE = 2, 5  # numbers of multipliers


@dataclass(frozen=True, slots=True)
class MupMultipliers:
    """Constant multipliers of parts of layers used in training (arXiv 2203.03466); folded into the weights."""

    attention_input: float
    keys: float
    attention_output: float
    space: SpaceScales
    gates: float
    feed_forward: float


@dataclass(frozen=True, slots=True)
class FalconH1Config(DecoderConfig):
    """Decoder configuration with the multipliers of parts of its layers."""

    multipliers: MupMultipliers = field(kw_only=True)


class FalconH1Attention(Attention):
    """Llama's attention with multipliers of its input, keys and output."""

    def __init__(self, name: str, config: FalconH1Config, backend: AttentionBackend, place: LayerPlacement) -> None:
        super().__init__(name, config, 0, backend, place, reduce_results=False)
        self._multipliers = config.multipliers

    def finish(self) -> None:
        """Folds the multipliers of input, keys and output into the loaded weights."""
        multipliers, heads = self._multipliers, self._heads
        sizes = [self._config.head_dim * count for count in (heads.num_q, heads.num_kv, heads.num_kv)]
        self.qkv.scale(by_rows((1.0, multipliers.keys, 1.0), sizes), multipliers.attention_input)
        self.output.scale(multipliers.attention_output)
        super().finish()


class FalconH1Layer(DecoderLayer):
    """Layer with attention and a state space; the state is its second cache."""

    def __init__(self, index: int, config: FalconH1Config, backend: AttentionBackend, place: LayerPlacement) -> None:
        name, size, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
        multipliers = config.multipliers
        self._input_norm = RMSNorm(f"{name}.input_layernorm", size, eps, place)
        self._attention = FalconH1Attention(f"{name}.self_attn", config, backend, place)
        self._space = StateSpace(f"{name}.mamba", config, place, multipliers.space, reduce_results=False)
        self._middle_norm = RMSNorm(f"{name}.pre_ff_layernorm", size, eps, place, reduce_results=True)
        self.mlp = MLP(
            f"{name}.feed_forward",
            size,
            config.intermediate_size,
            config.feed_forward.bias,
            place,
            scale=multipliers.feed_forward,
            gate_scale=multipliers.gates,
        )
        self._parts = (self._input_norm, self._attention, self._space, self._middle_norm, self.mlp)

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Runs attention and state space on the same normed input and the feed-forward on their sum."""
        q, space_output = self._stored(x, residual, batch, cache, cos_sin)
        return self._completed(q, space_output, residual, cache, batch.attention)

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Stores keys, values and states; returns queries and the state space's output, concatenated to [num_tokens,
        width]."""
        import torch

        q, space_output = self._stored(x, residual, batch, cache, cos_sin)
        return torch.cat((q.flatten(1), space_output), dim=1)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Splits what store() returned, attends, and runs the feed-forward on the sum of attention and state space."""
        shape = self._attention.q_shape
        queries, space_output = q.tensor_split((math.prod(shape),), dim=1)
        queries = queries.unflatten(1, shape).contiguous()
        return self._completed(queries, space_output.contiguous(), residual, cache, metadata)

    def _stored(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values in the first cache and states in the second; returns queries and the state space's
        output."""
        assert batch.second is not None, "the layer keeps a state, too"
        assert cache.second is not None
        x = normed(self._input_norm, x, residual)
        q = self._attention.store(x, batch, cache, cos_sin)
        return q, self._space.store(x, batch.second, cache.second, cos_sin)

    def _completed(
        self, q: Tensor, space_output: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Attends, adds the state space's output and runs the feed-forward; returns the layer's update."""
        mixed = self._attention.attend(q, cache, metadata) + self._space.attend(space_output, cache, metadata)
        return self.mlp(self._middle_norm(mixed, residual))


class FalconH1ForCausalLM(CausalLM):
    """Falcon-H1; the multipliers are folded into the weights."""

    norm_name: ClassVar[str] = "model.final_layernorm"

    @staticmethod
    def read(config: ConfigFile) -> FalconH1Config:
        """Reads config.json, including the multipliers of layers (muP). Raises InvalidArgument for zero or infinite
        ones."""
        bias = config.flag("attention_bias")
        decoder = read_decoder(config)
        decoder = replace(
            decoder,
            rms_norm_eps=config.number("rms_norm_eps", 1e-5),
            attention=AttentionConfig(qkv_bias=bias, o_bias=bias),
            feed_forward=replace(decoder.feed_forward, bias=config.flag("mlp_bias")),
            scales=ScaleConfig(
                embedding=_read_multiplier(config, "embedding_multiplier"),
                logit=_read_multiplier(config, "lm_head_multiplier"),
            ),
            recurrent=_read_recurrent(config, decoder),
        )
        known = {item.name: getattr(decoder, item.name) for item in fields(decoder)}
        return FalconH1Config(**known, multipliers=_read_multipliers(config))

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> FalconH1Layer:
        assert isinstance(config, FalconH1Config)
        return FalconH1Layer(index, config, backend, place)


def _read_recurrent(config: ConfigFile, decoder: DecoderConfig) -> SpaceConfig:
    """Reads the state space's configuration, the same in all layers.

    Its inner size is mamba_d_ssm or, if that is null, mamba_expand * hidden_size. Raises InvalidArgument if
    mamba_d_head contradicts it.
    """
    values: int | None = None
    if config.has("mamba_d_ssm") or "mamba_d_ssm" not in config.values:  # null: derived from the hidden size
        values = config.integer("mamba_d_ssm", DEFAULT_VALUES)
    named = "mamba_expand * hidden_size" if values is None else "mamba_d_ssm"
    if values is None:
        values = config.integer("mamba_expand", 2) * decoder.hidden_size
    sizes = read_space(config, values, (True,) * decoder.num_layers, named=named)
    stated = config.get("mamba_d_head", "auto")
    if stated not in ("auto", sizes.value_dim):
        raise refusal(
            "mamba_d_head", stated, f"{sizes.num_heads} heads share {values} elements, {sizes.value_dim} each"
        )
    return replace(
        sizes,
        beside_attention=True,
        output_bias=config.flag("projectors_bias"),
        has_norm=config.flag("mamba_rms_norm"),
        norm_before_gate=config.flag("mamba_norm_before_gate", True),
    )


def _read_multipliers(config: ConfigFile) -> MupMultipliers:
    """Reads all multipliers of a layer's parts; missing ones are 1."""
    gates, feed_forward = _read_list(config, "mlp_multipliers", OF_FEED_FORWARD)
    return MupMultipliers(
        attention_input=_read_multiplier(config, "attention_in_multiplier"),
        keys=_read_multiplier(config, "key_multiplier"),
        attention_output=_read_multiplier(config, "attention_out_multiplier"),
        space=SpaceScales(
            input=_read_multiplier(config, "ssm_in_multiplier"),
            parts=_read_list(config, "ssm_multipliers", OF_SPACE),
            output=_read_multiplier(config, "ssm_out_multiplier"),
        ),
        gates=gates,
        feed_forward=feed_forward,
    )


def _read_multiplier(config: ConfigFile, name: str) -> float:
    """Reads one multiplier, 1 by default. Raises InvalidArgument for 0 and infinity."""
    factor = config.number(name, 1.0)
    if not _is_usable(factor):
        raise refusal(name, factor, "a finite number other than 0 is needed")
    return factor


def _read_list(config: ConfigFile, name: str, length: int) -> tuple[float, ...]:
    """Reads a list of `length` multipliers, all 1 by default. Raises InvalidArgument for other lengths, 0 and
    infinity."""
    factors = config.numbers(name) if config.has(name) else (1.0,) * length
    if len(factors) != length or not all(map(_is_usable, factors)):
        raise refusal(name, list(factors), f"{length} finite numbers other than 0 are needed")
    return factors


def _is_usable(factor: float) -> bool:
    return math.isfinite(factor) and factor != 0
