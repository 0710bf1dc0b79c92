"""Llama 1 to 3 (LlamaForCausalLM); its pre-norm blocks are the base of most families."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.attention.latent_attention import LatentAttention
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.experts import SparseMLP
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.recurrent.gated_delta_net import GatedDeltaNet
from quire.services.worker.layers.recurrent.state_space import StateSpace
from quire.services.worker.models import single_row
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.decoder_layer import DecoderLayer, normed

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import LayerPlacement


Mixer = Attention | LatentAttention | GatedDeltaNet | StateSpace  # token mixers


class LlamaLayer(DecoderLayer):
    """Pre-norm decoder layer: attention, then feed-forward, each with an RMSNorm and added to the residual stream."""

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Runs the whole layer: adds `x` and attention's output to the residual in place and returns the feed-forward's
        update."""
        x = normed(self.input_norm, x, residual)
        x = self.attention(x, batch, cache, cos_sin)
        return self._feed(x, residual)

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Normalizes the input, stores keys and values (or a recurrent state) and returns the queries."""
        return self.attention.store(normed(self.input_norm, x, residual), batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends and runs the feed-forward; returns the layer's update of the residual stream."""
        return self._feed(self.attention.attend(q, cache, metadata), residual)

    def _feed(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Adds the attention's output to the residual in place and returns the feed-forward of the normed sum."""
        return self.mlp(self.middle_norm(attended, residual))

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        backend: AttentionBackend,
        place: LayerPlacement,
        *,
        attention: Mixer | None = None,
        experts: SparseMLP | MLP | None = None,
    ) -> None:
        """Builds the layer of one index without weights.

        `attention`: token mixer in place of Llama's attention; `experts`: feed-forward in place of the dense one, e.g.
        a mixture of experts.
        """
        name, size, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
        offset, window = config.scales.norm_offset, config.sliding_windows[index]
        norm_adds = attention is None and place.shard.collectives.fuses_rms_norm
        self.input_norm = RMSNorm(f"{name}.input_layernorm", size, eps, place, offset=offset)
        self.attention: Mixer = attention or Attention(
            f"{name}.self_attn", config, window, backend, place, reduce_results=not norm_adds
        )
        self.middle_norm = RMSNorm(
            f"{name}.post_attention_layernorm", size, eps, place, offset=offset, reduce_results=norm_adds
        )
        self.mlp: MLP | SparseMLP = experts or MLP(
            f"{name}.mlp",
            size,
            config.intermediate_size,
            config.feed_forward.bias,
            place,
            activation=config.feed_forward.activation,
            fused=config.feed_forward.fused,
            scale=config.scales.residual,
        )
        self._parts = (self.input_norm, self.attention, self.middle_norm, self.mlp)


class LlamaForCausalLM(CausalLM):
    """Llama; biases of attention and feed-forward by two flags."""

    taped_functions: ClassVar[tuple[str, ...]] = (
        "linear",
        "embed",
        "rms_norm",
        "add_rms_norm",
        "qk_norm_rope_store",
        "silu_mul",
    )

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json with the flags attention_bias and mlp_bias."""
        decoder, bias = read_decoder(config), config.flag("attention_bias")
        feed_forward = replace(decoder.feed_forward, bias=config.flag("mlp_bias"))
        return replace(decoder, attention=AttentionConfig(qkv_bias=bias, o_bias=bias), feed_forward=feed_forward)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> LlamaLayer:
        return LlamaLayer(index, config, backend, place)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return single_row.reject_reason(config, place)
