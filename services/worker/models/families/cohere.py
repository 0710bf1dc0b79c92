"""Command R and A (CohereForCausalLM, Cohere2ForCausalLM): parallel attention and feed-forward after one norm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.block_config import AttentionConfig, ScaleConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import NO_ROPE, read_rope
from quire.services.worker.models.decoder_layer import DecoderLayer, normed
from quire.services.worker.models.families.gemma3 import WINDOWED, read_kinds

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import LayerPlacement


class CohereLayer(DecoderLayer):
    """Parallel layer: x + attention(norm(x)) + feed-forward(norm(x))."""

    def __init__(self, index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> None:
        name, size = f"model.layers.{index}", config.hidden_size
        self._norm = LayerNorm(f"{name}.input_layernorm", size, config.rms_norm_eps, place, bias=False)
        self._attention = Attention(f"{name}.self_attn", config, config.sliding_windows[index], backend, place)
        self.mlp = MLP(f"{name}.mlp", size, config.intermediate_size, False, place)
        self._parts = (self._norm, self._attention, self.mlp)

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Runs the layer with one norm for both halves, where store() and complete() compute it twice."""
        x = normed(self._norm, x, residual)
        return self._attention(x, batch, cache, cos_sin).add_(self.mlp(x))

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Stores keys and values of the normalized input and returns the queries; see DecoderLayer."""
        x = normed(self._norm, x, residual)
        return self._attention.store(x, batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends and adds the feed-forward, for which it normalizes the residual again."""
        return self._attention.attend(q, cache, metadata).add_(self.mlp(self._norm(residual)))


def read_cohere(config: ConfigFile) -> DecoderConfig:
    """Reads the fields that Command R and A share: tied embeddings, scaled logits, rotation of neighbouring pairs.

    Raises InvalidArgument for checkpoints that normalize queries and keys.
    """
    if config.flag("use_qk_norm"):
        raise refusal("use_qk_norm", True, "normalization of queries and keys is not supported")
    defaults = {"tie_word_embeddings": True, **config.values}
    decoder = read_decoder(ConfigFile(defaults), rope=replace(read_rope(config), interleaved=True))
    bias = config.flag("attention_bias")
    return replace(
        decoder,
        rms_norm_eps=config.number("layer_norm_eps", 1e-5),
        scales=ScaleConfig(logit=config.number("logit_scale", 0.0625)),
        attention=AttentionConfig(qkv_bias=bias, o_bias=bias),
    )


class CohereForCausalLM(CausalLM):
    """Command R: rotary positions in neighbouring pairs, the same attention in all layers."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        return read_cohere(config)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> CohereLayer:
        return CohereLayer(index, config, backend, place)

    @staticmethod
    def final_norm(config: DecoderConfig, place: LayerPlacement) -> LayerNorm:
        """Returns a LayerNorm without bias that includes the scale of the logits."""
        eps, scale = config.rms_norm_eps, config.scales.logit
        return LayerNorm("model.norm", config.hidden_size, eps, place, bias=False, scale=scale)


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command A: layers with full attention have no positions; the others have a window and rotary positions."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json: by default every fourth layer has full attention without positions."""
        decoder = read_cohere(config)
        kinds = read_kinds(ConfigFile({"sliding_window_pattern": 4, **config.values}), decoder.num_layers)
        window = config.integer("sliding_window", 4096)
        return replace(
            decoder,
            sliding_windows=tuple(window if kind == WINDOWED else 0 for kind in kinds),
            ropes=tuple(decoder.rope if kind == WINDOWED else NO_ROPE for kind in kinds),
        )
