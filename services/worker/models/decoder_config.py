"""The sizes that every decoder-only transformer's config.json names, and what its family makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.models.config_file import ConfigFile, refusal
from services.worker.models.experts_config import ExpertsConfig
from services.worker.models.rope_config import RopeConfig, max_positions, read_rope


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Grouped-query attention and a gated feed-forward layer in each block, on rotary positions."""

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
    dtype: str  # of the checkpoint; "" if it does not say
    tie_word_embeddings: bool
    sliding_windows: tuple[int, ...]  # by layer; 0: none
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None


def read_decoder(config: ConfigFile) -> DecoderConfig:
    """What all families share; each replaces what it decides itself (windows, biases, norms)."""
    _refuse_unknown(config)
    rope = read_rope(config)
    num_q_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    num_kv_heads = config.integer("num_key_value_heads", num_q_heads)
    num_layers = config.integer("num_hidden_layers")
    if num_q_heads % num_kv_heads:
        raise refusal("num_key_value_heads", num_kv_heads, f"must divide num_attention_heads, {num_q_heads}")
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", hidden_size // num_q_heads),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=max_positions(config, rope),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        sliding_windows=(0,) * num_layers,
    )


def _refuse_unknown(config: ConfigFile) -> None:
    """What would change the numbers and is not done here."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise refusal("hidden_act", activation, "there is silu")
    quantization = config.get("quantization_config")
    if quantization:
        raise refusal("quantization_config", quantization, "quantized checkpoints cannot be loaded")
