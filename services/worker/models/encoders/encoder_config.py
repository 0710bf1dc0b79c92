"""Configuration of encoders, as read from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.activation import KNOWN
from quire.services.worker.models.config.rope_config import NO_ROPE, RopeConfig

CLS, MEAN = "cls", "mean"


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Configuration of an encoder with bidirectional attention over whole prompts."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: str
    max_positions: int
    dtype: str  # checkpoint dtype; "": not given
    first_position: int = 0  # table row of position 0
    num_token_types: int = 0  # 0: no token types
    half_windows: tuple[int, ...] = ()  # by layer: visible tokens to each side, 0: all; empty: all in every layer
    ropes: tuple[RopeConfig, ...] = ()  # by layer; empty: no rotary positions
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    classifier_bias: bool = True
    classifier_activation: str = "tanh"
    classifier_pooler: str = CLS
    num_classes: int = 0  # 0: no classifier
    head_size: int = 0  # elements of a head; 0: hidden_size / num_heads
    shared_kv_heads: int = 0  # heads of keys and values, where several heads of queries share one; 0: num_heads
    projection_size: int = 0  # of the vectors after the encoder's projection; 0: it has none

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.shared_kv_heads or self.num_heads

    @property
    def output_size(self) -> int:
        """Elements of the vector of each token."""
        return self.projection_size or self.hidden_size

    def half_window(self, layer: int) -> int:
        return self.half_windows[layer] if self.half_windows else 0

    def rope(self, layer: int) -> RopeConfig:
        return self.ropes[layer] if self.ropes else NO_ROPE


def read_encoder(config: ConfigFile) -> EncoderConfig:
    """Reads the fields that BERT and its successors share.

    Raises InvalidArgument for decoders, cross-attention, other than absolute positions, and quantized checkpoints.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise refusal("num_attention_heads", num_heads, f"must divide hidden_size, {hidden_size}")
    if config.flag("is_decoder") or config.flag("add_cross_attention"):
        raise refusal("is_decoder", True, "decoders of this family are not supported")
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise refusal("position_embedding_type", positions, "supported: absolute")
    if config.has("quantization_config"):
        raise refusal("quantization_config", config.get("quantization_config"), "quantized encoders are not supported")
    return EncoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=read_activation(config, "hidden_act"),
        max_positions=config.integer("max_position_embeddings"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
    )


def read_activation(config: ConfigFile, name: str) -> str:
    """Reads the name of an activation, "gelu" by default. Raises InvalidArgument for unknown ones."""
    activation = config.get(name, "gelu")
    if activation not in KNOWN:
        raise refusal(name, activation, f"supported: {', '.join(KNOWN)}")
    return str(activation)
