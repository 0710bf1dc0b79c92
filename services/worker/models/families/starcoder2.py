"""StarCoder2 (Starcoder2ForCausalLM): GPT-2's layers with rotary positions and grouped queries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.activation import KNOWN
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.prenorm import PrenormLayer

if TYPE_CHECKING:
    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import LayerPlacement


class Starcoder2ForCausalLM(CausalLM):
    """StarCoder2: biases in all projections; one window for all layers, or none."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json: tied embeddings and tanh-GELU by default, biases by one flag."""
        defaults = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, **config.values}
        decoder, bias = read_decoder(ConfigFile(defaults), activations=KNOWN), config.flag("use_bias", True)
        return replace(
            decoder,
            rms_norm_eps=config.number("norm_epsilon", 1e-5),
            sliding_windows=(config.integer("sliding_window", 0),) * decoder.num_layers,
            attention=AttentionConfig(qkv_bias=bias, o_bias=bias),
            feed_forward=replace(decoder.feed_forward, bias=bias),
        )

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> PrenormLayer:
        name, size, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
        up, down = Projection(f"{name}.mlp.c_fc", config.intermediate_size), Projection(f"{name}.mlp.c_proj", size)
        feed_forward = config.feed_forward
        return PrenormLayer(
            LayerNorm(f"{name}.input_layernorm", size, eps, place),
            Attention(f"{name}.self_attn", config, config.sliding_windows[index], backend, place),
            LayerNorm(f"{name}.post_attention_layernorm", size, eps, place),
            PlainMLP(up, down, size, feed_forward.bias, place, activation=feed_forward.activation),
        )

    @staticmethod
    def final_norm(config: DecoderConfig, place: LayerPlacement) -> LayerNorm:
        return LayerNorm("model.norm", config.hidden_size, config.rms_norm_eps, place)
