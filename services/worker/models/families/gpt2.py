"""GPT-2 (GPT2LMHeadModel): learned positions, transposed weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.activation import KNOWN
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import NO_ROPE
from quire.services.worker.models.positions import LearnedPositions
from quire.services.worker.models.prenorm import PrenormLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import LayerPlacement

# Its names of common config.json fields.
NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}


class Gpt2Attention(Attention):
    """Attention with one transposed tensor for queries, keys and values."""

    @staticmethod
    def inputs(name: str, q_size: int, kv_size: int, config: DecoderConfig) -> list[Projection]:
        return [Projection(f"{name}.c_attn", q_size + 2 * kv_size, transposed=True)]

    @staticmethod
    def outputs(name: str, config: DecoderConfig) -> Projection:
        return Projection(f"{name}.c_proj", config.hidden_size, transposed=True)


class GPT2LMHeadModel(LearnedPositions):
    """GPT-2: learned positions, biases in all projections, tied output head by default."""

    embedding_name: ClassVar[str] = "transformer.wte"
    positions_name: ClassVar[str] = "transformer.wpe"

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json under GPT-2's field names. Raises InvalidArgument for scores scaled by layer and for
        cross-attention."""
        for unknown in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            if config.flag(unknown):
                raise refusal(unknown, True, "this kind of attention is not supported")
        values = {"tie_word_embeddings": True, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
        values |= config.values
        named = values | {ours: values.get(theirs) for ours, theirs in NAMES.items()}
        named |= {"num_key_value_heads": None, "head_dim": None}  # multi-head attention
        named["intermediate_size"] = config.get("n_inner") or 4 * config.integer("n_embd")
        decoder = read_decoder(ConfigFile(named), rope=NO_ROPE, activations=KNOWN)
        scale = None if config.flag("scale_attn_weights", True) else 1.0
        attention = AttentionConfig(qkv_bias=True, o_bias=True, scale=scale)
        return replace(decoder, attention=attention, feed_forward=replace(decoder.feed_forward, bias=True))

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> PrenormLayer:
        """Returns the pre-norm layer at `index`, whose checkpoint weights are transposed."""
        name, size, eps = f"transformer.h.{index}", config.hidden_size, config.rms_norm_eps
        up = Projection(f"{name}.mlp.c_fc", config.intermediate_size, transposed=True)
        down = Projection(f"{name}.mlp.c_proj", size, transposed=True)
        return PrenormLayer(
            LayerNorm(f"{name}.ln_1", size, eps, place),
            Gpt2Attention(f"{name}.attn", config, 0, backend, place),
            LayerNorm(f"{name}.ln_2", size, eps, place),
            PlainMLP(up, down, size, True, place, activation=config.feed_forward.activation),
        )

    @staticmethod
    def final_norm(config: DecoderConfig, place: LayerPlacement) -> LayerNorm:
        return LayerNorm("transformer.ln_f", config.hidden_size, config.rms_norm_eps, place)

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of checkpoint tensors to ignore, including attention masks stored in old checkpoints."""
        layers = [f"transformer.h.{i}.attn" for i in range(self.config.num_layers)]
        return (*super().passed_over, *(f"{name}.{mask}" for name in layers for mask in ("bias", "masked_bias")))
