"""Decode steps of one token as a chain of fused kernels: a single stream is bound by gaps between kernels.

Six kernels a layer instead of nine, each of which loads its weights while the previous one still runs (row_linear,
row_attention and pdl of quire.kernels.triton). On an H200, 28 layers of hidden size 1024: 0.57 ms a step; 1.16 as
CausalLM.forward with cuBLAS. A layer's parts add themselves to the chain (`run_row`) with the operations of RowKernels.
A low-rank adapter's first product runs in the same launch, its second in one more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.config.experts_config import ExpertsConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quire.kernels.routing import Routing
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.lora.linear_adapters import LinearAdapters


def model_reject_reason(model: CausalLM, place: LayerPlacement) -> str | None:
    """Returns why a model's single-token steps cannot run as a chain of fused kernels, or None.

    A plugin's family may inherit from one that offers the chain but compute something else around its layers.
    """
    family = type(model)
    if not (family.forward is CausalLM.forward and family.run is CausalLM.run and family.logits is CausalLM.logits):
        return "the family overrides the forward pass"
    return model.single_row(model.config, place)


def reject_reason(config: DecoderConfig, place: LayerPlacement) -> str | None:
    """Returns why a chain of attention and gated feed-forward layers cannot run with this configuration on this device,
    or None."""
    if place.batch_invariant:
        return "the single-row program sums in another order (batch_invariant)"
    if not place.shard.collectives.fuses_residual_add:
        return "ranks reduce with NCCL"
    if place.ops.sources["rms_norm"] != "quire.kernels.triton":
        return "needs quire.kernels.triton"
    if config.attention.has_sinks:
        return "attention sinks are not supported"
    return _weights_reject_reason(place) or _sizes_reject_reason(config, place)


def _weights_reject_reason(place: LayerPlacement) -> str | None:
    """Returns why the chain cannot read the checkpoint's quantized weights, or None."""
    if place.checkpoint is None or place.checkpoint.supports_single_row:
        return None
    return f"{place.checkpoint.method} has weights other than 4-bit ones and 8-bit ones with a scale per row"


def _sizes_reject_reason(config: DecoderConfig, place: LayerPlacement) -> str | None:
    """Returns why the chain's kernels do not support the model's sizes on this rank, or None."""
    from quire.kernels.reference.fp8_weight import BLOCK
    from quire.kernels.triton.single_row.row_attention import row_attention_takes
    from quire.kernels.triton.single_row.row_linear import row_linear_takes

    if not row_attention_takes(config.head_dim):
        return f"heads of {config.head_dim} are not a multiple of half a matrix operand"
    heads = place.shard.heads(config.num_q_heads, config.num_kv_heads)
    gates = len(place.shard.part(config.intermediate_size, "intermediate_size"))
    if place.quantization == "fp8_block" and gates % BLOCK:
        return f"{gates} gates are not a multiple of {BLOCK}"
    sizes = (config.hidden_size, heads.num_q * config.head_dim, gates)
    uneven = [size for size in sizes if not row_linear_takes(size)]
    return f"rows of {uneven[0]} elements are not a multiple of a chunk" if uneven else None


def experts_reject_reason(experts: ExpertsConfig, shard: Shard) -> str | None:
    """Returns why the chain cannot run with these experts (sharded, with biases, a shared one, too many per token), or
    None."""
    from quire.kernels.triton.single_row.row_experts import row_experts_takes

    if not shard.is_whole:
        return "experts on several ranks are not supported"
    if experts.biased or experts.score_correction_bias or experts.router_bias:
        return "biases of experts are not supported"
    if experts.shared_intermediate_size:
        return "a shared expert is not supported"
    return (
        None if row_experts_takes(experts.routing) else f"{experts.routing.top_k} experts per token are not supported"
    )


class RowLinear(Protocol):
    """Linear layer in the chain: packed weights and optional adapters."""

    packed: Any
    adapters: LinearAdapters | None


class RowKernels:
    """Operations on one row that layers of the chain use."""

    def __init__(self, cos_sin: Tensor, shard: Shard, *, pdl: bool) -> None:
        """Imports and binds the Triton kernels.

        `cos_sin`: the model's rotary table; `pdl`: the device supports programmatic dependent launch.
        """
        from quire.kernels.triton.single_row.row_attention import row_attention
        from quire.kernels.triton.single_row.row_experts import row_experts
        from quire.kernels.triton.single_row.row_linear import RowNorm, row_linear
        from quire.kernels.triton.single_row.row_low_rank import row_low_rank
        from quire.kernels.triton.single_row.row_narrow import Narrow

        self._attention: Callable[..., Tensor] = row_attention
        self._experts: Callable[..., None] = row_experts
        self._linear: Callable[..., Tensor] = row_linear
        self._add_low_rank: Callable[..., Tensor] = row_low_rank
        self._norm: Any = RowNorm
        self._narrow: Any = Narrow
        self._cos_sin, self._shard = cos_sin, shard
        self._pdl = pdl

    def linear(
        self,
        x: Tensor,
        layer: RowLinear,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Multiplies one row x [1, in_features], normalized first if `norm` is given, including adapters.

        `gated`: returns silu of the first half of the product times the second.
        """
        normed = self._norm(norm.weight, norm.eps) if norm is not None else None
        narrow = self._narrow_of(x, layer.adapters)
        if narrow is None:
            return self._linear(x, layer.packed, norm=normed, gated=gated, pdl=self._pdl)
        y = self._linear(x, layer.packed, norm=normed, narrow=narrow, pdl=self._pdl)
        return self._add_low_rank(y, narrow, gated=gated, pdl=self._pdl)

    def linear_into(self, residual: Tensor, x: Tensor, layer: RowLinear) -> None:
        """Adds the product to the residual in place, reduced over all ranks if they hold parts of the inputs."""
        narrow = self._narrow_of(x, layer.adapters)
        if not self._shard.is_whole:
            product = self._linear(x, layer.packed, narrow=narrow, pdl=self._pdl)
            if narrow is not None:
                product = self._add_low_rank(product, narrow, pdl=self._pdl)
            self._shard.collectives.all_reduce_add(residual, product, pdl=self._pdl)
        elif narrow is None:
            self._linear(x, layer.packed, residual=residual, pdl=self._pdl)
        else:
            product = self._linear(x, layer.packed, narrow=narrow, pdl=self._pdl)
            self._add_low_rank(product, narrow, residual=residual, pdl=self._pdl)

    def _narrow_of(self, x: Tensor, adapters: LinearAdapters | None) -> Any:
        """Returns memory for the adapters' first product, or None in steps without adapters."""
        if adapters is None or not adapters.is_active:
            return None
        products = x.new_empty(adapters.packed.most_ranks)
        return self._narrow(adapters.packed, adapters.rows.starts, products)

    def experts(
        self, residual: Tensor, norm: RMSNorm, logits: Tensor, *, routing: Routing, packed: Any, load: Tensor | None
    ) -> None:
        """Adds the output of the experts chosen by `logits`, for the normalized residual, to it in place."""
        normed = self._norm(norm.weight, norm.eps)
        self._experts(residual, normed, logits, routing, packed, load, pdl=self._pdl)

    def attention(
        self,
        qkv: Tensor,
        norm_weights: tuple[Tensor | None, Tensor | None],
        eps: float,
        batch: ForwardBatch,
        cache: LayerCache,
        *,
        num_q_heads: int,
        scale: float,
        window: int,
    ) -> Tensor:
        """Runs query and key norms, rotation, KV store and attention on the projected row; returns [1, num_q_heads *
        head_dim]."""
        return self._attention(
            qkv,
            *norm_weights,
            eps,
            self._cos_sin,
            batch.slot_mapping,
            cache.k,
            cache.v,
            batch.attention.block_tables,
            batch.attention.seq_lens,
            num_q_heads,
            scale,
            window,
            pdl=self._pdl,
        )


class RowAttention(Protocol):
    """Attention layer that can be part of the chain."""

    def run_row(
        self, kernels: RowKernels, residual: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache
    ) -> None:
        """Adds attention of the normalized residual to it, in a step of one token."""


class RowFeedForward(Protocol):
    """Feed-forward layer that can be part of the chain."""

    def run_row(self, kernels: RowKernels, residual: Tensor, norm: RMSNorm) -> None:
        """Adds the layer's output for the normalized residual to it, in a step of one token."""


@runtime_checkable
class RowLayer(Protocol):
    """Layer that the chain runs part by part, as LlamaLayer."""

    input_norm: RMSNorm
    attention: RowAttention
    middle_norm: RMSNorm
    mlp: RowFeedForward


class SingleRowProgram:
    """Runs a model's decode steps of one token as a chain of fused kernels; created after its weights are loaded."""

    def __init__(self, model: CausalLM, *, pdl: bool) -> None:
        """Takes a loaded model; `pdl`: the device supports programmatic dependent launch."""
        self._model = model
        self._layers = [layer for layer in model.layers if isinstance(layer, RowLayer)]
        assert len(self._layers) == len(model.layers), "a family that offers the chain has such layers"
        self._kernels = RowKernels(model.cos_sin, model.shard, pdl=pdl)

    def layers(self, residual: Tensor, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Returns the residual stream after this stage's layers, changed in place."""
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.attention.run_row(self._kernels, residual, layer.input_norm, batch.for_cache(cache), cache)
            layer.mlp.run_row(self._kernels, residual, layer.middle_norm)
        return residual

    def logits(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Returns logits [1, tokens of this rank] of a step of one token, as CausalLM.logits()."""
        model = self._model
        residual = self.layers(model.embed(batch), batch, caches)
        assert isinstance(model.norm, RMSNorm), "families with other norms do not offer this"
        return model.head.pad_vocab(self._kernels.linear(residual, model.head, norm=model.norm))
