"""Configuration common to all decoder-only transformers, and how it is read from config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.services.worker.layers.attention.latent_attention import LatentConfig
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.activation import SILU
from quire.services.worker.layers.quantization.port import CheckpointQuantization
from quire.services.worker.layers.quantization.registry import read_quantization
from quire.services.worker.layers.recurrent.layer import RecurrentConfig
from quire.services.worker.models.config.block_config import (
    GATED_SILU,
    GROUPED_QUERIES,
    UNSCALED,
    AttentionConfig,
    FeedForwardConfig,
    ScaleConfig,
)
from quire.services.worker.models.config.experts_config import ExpertsConfig
from quire.services.worker.models.config.rope_config import RopeConfig, max_positions, read_rope


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Configuration of a decoder: grouped-query attention and a gated feed-forward layer per block, rotary positions.

    Holds what every family has and the parts that families vary. A value read only by one family's module is a field of
    a subclass there, as Llama4Config.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    dtype: str  # checkpoint dtype; "": not given
    tie_word_embeddings: bool
    sliding_windows: tuple[int, ...]  # by layer; 0: none
    attention: AttentionConfig = GROUPED_QUERIES
    feed_forward: FeedForwardConfig = GATED_SILU
    scales: ScaleConfig = UNSCALED
    experts: ExpertsConfig | None = None  # replaces the feed-forward of some layers
    latent: LatentConfig | None = None  # latent attention: a compressed vector is cached
    recurrent: RecurrentConfig | None = (
        None  # some layers keep a recurrent state instead of, or besides, keys and values
    )
    ropes: tuple[RopeConfig, ...] = ()  # by layer; empty: `rope` in all
    quantization: CheckpointQuantization | None = None  # quantization of the checkpoint's projections
    num_next_layers: int = 0  # multi-token prediction layers after the last (spec_decode/methods/mtp.py)
    num_classes: int = 0  # > 0: sequence classification instead of generation

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether each layer has attention and so caches keys and values; False for purely recurrent layers."""
        if self.recurrent is None or self.recurrent.beside_attention:
            return (True,) * self.num_layers
        return tuple(not recurs for recurs in self.recurrent.layers)

    @property
    def rope_dim(self) -> int:
        """Elements of a head covered by the rotary table."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def with_next_layers(self) -> DecoderConfig:
        """Returns a configuration in which the multi-token prediction layers follow as ordinary layers, with full
        attention and experts as in the last layer."""
        count, experts = self.num_next_layers, self.experts
        if experts is not None:
            behind = (experts.sparse_layers[-1],) * count
            experts = replace(experts, sparse_layers=(*experts.sparse_layers, *behind))
        windows = (*self.sliding_windows, *(0,) * count)
        return replace(self, num_layers=self.num_layers + count, sliding_windows=windows, experts=experts)

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a quantized checkpoint whose experts are stacked in one tensor."""
        if self.quantization is not None and self.experts is not None and not self.experts.by_expert:
            raise refusal(
                "quantization_config.quant_method", self.quantization.method, "it is not supported for experts"
            )


def read_decoder(
    config: ConfigFile, *, rope: RopeConfig | None = None, activations: tuple[str, ...] = SILU
) -> DecoderConfig:
    """Reads the fields that all families share; each family replaces what it decides itself (windows, biases, norms).

    `rope`: as read by the family; None: read here. `activations`: names that the family's layers support. Raises
    InvalidArgument for missing, inconsistent or unsupported fields.
    """
    activation = _activation(config, activations)
    rope = rope or read_rope(config)
    num_q_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    num_kv_heads = config.integer("num_key_value_heads", num_q_heads)
    num_layers = config.integer("num_hidden_layers")
    if num_q_heads % num_kv_heads:
        raise refusal("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads, {num_q_heads}")
    head_dim = config.integer("head_dim", hidden_size // num_q_heads)
    if rope.sections and not rope.sections_alternate and sum(rope.sections) != head_dim // 2:
        raise refusal("mrope_section", list(rope.sections), f"a head has {head_dim // 2} pairs")
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=max_positions(config, rope),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        sliding_windows=(0,) * num_layers,
        feed_forward=FeedForwardConfig(activation),
        quantization=read_quantization(config),
    )


def _activation(config: ConfigFile, known: tuple[str, ...]) -> str:
    """Returns the activation's name, "silu" by default. Raises InvalidArgument if it is not in `known`."""
    name = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    activation = config.get(name, "silu")
    if activation not in known:
        raise refusal(name, activation, f"supported: {', '.join(known)}")
    return str(activation)
