"""OLMo 2 (Olmo2ForCausalLM): norms after attention and feed-forward; queries and keys are normalized over all heads.

arXiv 2501.00656, section 3.1: x + norm(attention(x)), then x + norm(feed-forward(x)).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.mlp import MLP
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.norm.sharded_rms_norm import sharded_rms_norms
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.decoder_layer import DecoderLayer

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement


class Olmo2Attention(Attention):
    """Attention whose query and key norms span all heads."""

    def __init__(self, name: str, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> None:
        super().__init__(name, config, 0, backend, place)
        self._whole_norms = sharded_rms_norms(name, config, place)
        self._sizes = tuple(norm.size for norm in self._whole_norms)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from super().destinations()
        for norm in self._whole_norms:
            yield from norm.destinations()

    def _projected(self, x: Tensor) -> Tensor:
        """Returns queries, keys and values [num_tokens, width] with queries and keys normalized over all heads."""
        import torch

        q_size, kv_size = self._sizes
        q, k, v = self.qkv(x).split((q_size, kv_size, kv_size), dim=1)
        q, k = (norm(part.contiguous()) for norm, part in zip(self._whole_norms, (q, k), strict=True))
        return torch.cat((q, k, v), dim=1)


class Olmo2Layer(DecoderLayer):
    """Post-norm layer: attention, then feed-forward, each followed by a norm."""

    def __init__(self, index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> None:
        name, size, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
        self._attention = Olmo2Attention(f"{name}.self_attn", config, backend, place)
        self._attention_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, place)
        self.mlp = MLP(f"{name}.mlp", size, config.intermediate_size, False, place)
        self._mlp_norm = RMSNorm(f"{name}.post_feedforward_layernorm", size, eps, place)
        self._parts = (self._attention, self._attention_norm, self.mlp, self._mlp_norm)

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Adds `x` to the residual, stores keys and values and returns the queries; the input is not normalized."""
        if x is not None:
            residual += x
        return self._attention.store(residual, batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends, adds the normalized result to the residual, and returns the normalized feed-forward."""
        residual += self._attention_norm(self._attention.attend(q, cache, metadata))
        return self._mlp_norm(self.mlp(residual))


class Olmo2ForCausalLM(CausalLM):
    """OLMo 2: norms after attention and feed-forward, biases of attention by a flag, no windows."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json; biases of all attention projections by the flag attention_bias."""
        if config.flag("attention_bias"):
            return replace(read_decoder(config), attention=AttentionConfig(qkv_bias=True, o_bias=True))
        return read_decoder(config)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> Olmo2Layer:
        return Olmo2Layer(index, config, backend, place)
