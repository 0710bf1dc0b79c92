"""Llama 1 to 3 (LlamaForCausalLM), whose blocks most families share: normalise, attend, add; normalise, feed, add."""

from __future__ import annotations

from collections.abc import Iterator
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
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.layers.sharding import Collectives
    from quire.services.worker.models.single_row import RowKernels


class LlamaLayer:
    """Attention, then feed-forward, each beside the residual stream and with a norm at its door."""

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        backend: AttentionBackend,
        place: LayerPlacement,
        *,
        attention: Attention | LatentAttention | GatedDeltaNet | StateSpace | None = None,
        experts: SparseMLP | MLP | None = None,
    ) -> None:
        """`attention`: another than Llama's; `experts`: what there is in place of one feed-forward for all tokens."""
        name, size, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
        offset, window = config.norm_offset, config.sliding_windows[index]
        norm_adds = attention is None and place.shard.collectives.norms_sums
        self._input_norm = RMSNorm(f"{name}.input_layernorm", size, eps, place, offset=offset)
        self._attention: Attention | LatentAttention | GatedDeltaNet | StateSpace = attention or Attention(
            f"{name}.self_attn", config, window, backend, place, adds_up=not norm_adds
        )
        self._middle_norm = RMSNorm(
            f"{name}.post_attention_layernorm", size, eps, place, offset=offset, adds_up=norm_adds
        )
        self._mlp: MLP | SparseMLP = experts or MLP(
            f"{name}.mlp",
            size,
            config.intermediate_size,
            config.mlp_bias,
            place,
            activation=config.activation,
            fused=config.fused_mlp,
            scale=config.residual_scale,
        )
        self._parts = (self._input_norm, self._attention, self._middle_norm, self._mlp)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        return self._feed(self._attention(self._normed(x, residual), batch, cache, cos_sin), residual)

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        return self._attention.store(self._normed(x, residual), batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        return self._feed(self._attention.attend(q, cache, metadata), residual)

    def run_row(self, kernels: RowKernels, residual: Tensor, batch: ForwardBatch, cache: LayerCache) -> None:
        self._attention.run_row(kernels, residual, self._input_norm, batch, cache)
        self._mlp.run_row(kernels, residual, self._middle_norm)

    def defer_all_reduce(self, *, deferred: bool) -> bool:
        deferred = deferred and not (isinstance(self._mlp, SparseMLP) and self._mlp.dispatches)
        self._mlp.defer_all_reduce(deferred=deferred)
        return deferred

    def complete_all_reduce(self, collectives: Collectives | None) -> None:
        self._input_norm.complete_all_reduce(collectives)

    def _feed(self, attended: Tensor, residual: Tensor) -> Tensor:
        return self._mlp(self._middle_norm(attended, residual))

    def _normed(self, x: Tensor | None, residual: Tensor) -> Tensor:
        return self._input_norm(residual) if x is None else self._input_norm(x, residual)


class LlamaForCausalLM(CausalLM):
    """Biases by two flags."""

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
        bias = config.flag("attention_bias")
        return replace(read_decoder(config), qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias"))

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> LlamaLayer:
        return LlamaLayer(index, config, backend, place)

    @staticmethod
    def single_row(config: DecoderConfig, place: LayerPlacement) -> str | None:
        return single_row.reject_reason(config, place)
