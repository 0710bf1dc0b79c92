"""OPT (OPTForCausalLM, arXiv 2205.01068): GPT-2's layers with ReLU."""

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

EPS = 1e-5


class OptAttention(Attention):
    """Attention whose output projection is named `out_proj`."""

    @staticmethod
    def outputs(name: str, config: DecoderConfig) -> Projection:
        return Projection(f"{name}.out_proj", config.hidden_size)


class OPTForCausalLM(LearnedPositions):
    """OPT in all sizes but 350M, which has post-norm layers."""

    embedding_name: ClassVar[str] = "model.decoder.embed_tokens"
    positions_name: ClassVar[str] = "model.decoder.embed_positions"
    first_row: ClassVar[int] = 2

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json. Raises InvalidArgument for post-norm layers, norms without weights and embeddings of
        another width."""
        hidden = config.integer("hidden_size")
        if config.integer("word_embed_proj_dim", hidden) != hidden:
            raise refusal("word_embed_proj_dim", config.get("word_embed_proj_dim"), f"it must be hidden_size, {hidden}")
        for needed in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
            if not config.flag(needed, True):
                raise refusal(needed, False, "only pre-norm layers with weights are supported")
        named = {
            "tie_word_embeddings": True,
            **config.values,
            "num_key_value_heads": None,  # multi-head attention
            "head_dim": None,
            "intermediate_size": config.get("ffn_dim"),
            "hidden_act": config.get("activation_function", "relu"),
        }
        bias = config.flag("enable_bias", True)
        decoder = read_decoder(ConfigFile(named), rope=NO_ROPE, activations=KNOWN)
        attention, feed_forward = AttentionConfig(qkv_bias=bias, o_bias=bias), replace(decoder.feed_forward, bias=bias)
        return replace(decoder, rms_norm_eps=EPS, attention=attention, feed_forward=feed_forward)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> PrenormLayer:
        name, size = f"model.decoder.layers.{index}", config.hidden_size
        up, down = Projection(f"{name}.fc1", config.intermediate_size), Projection(f"{name}.fc2", size)
        return PrenormLayer(
            LayerNorm(f"{name}.self_attn_layer_norm", size, EPS, place),
            OptAttention(f"{name}.self_attn", config, 0, backend, place),
            LayerNorm(f"{name}.final_layer_norm", size, EPS, place),
            PlainMLP(up, down, size, config.feed_forward.bias, place, activation=config.feed_forward.activation),
        )

    @staticmethod
    def final_norm(config: DecoderConfig, place: LayerPlacement) -> LayerNorm:
        return LayerNorm("model.decoder.final_layer_norm", config.hidden_size, EPS, place)
