"""The decoder for a step of one token, as a chain of fused kernels: a single stream is bound by the time between them.

Six kernels a layer instead of nine, each of which loads its weights while the one before it still runs (kernels.triton:
row_linear, row_attention, pdl). On an H200, 28 layers of hidden size 1024: 0.57 ms a step; as Decoder.forward with
cuBLAS, 1.16.
"""

from __future__ import annotations

from typing import Any

from services.worker.forward_batch import ForwardBatch
from services.worker.kv_cache import LayerCache
from services.worker.layers.placement import Placement, Tensor
from services.worker.layers.rms_norm import RMSNorm
from services.worker.models.decoder import Decoder, DecoderLayer
from services.worker.models.decoder_config import DecoderConfig


def reject_reason(config: DecoderConfig, place: Placement) -> str | None:
    """Why this chain cannot run the model here, or None."""
    if place.batch_invariant:
        return "sums in an order of its own"
    if place.ops.sources["rms_norm"] != "kernels.triton":
        return "needs kernels.triton"
    from kernels.reference.fp8_linear import GROUP
    from kernels.triton.row_attention import row_attention_takes
    from kernels.triton.row_linear import row_linear_takes

    if not row_attention_takes(config.head_dim):
        return f"heads of {config.head_dim} do not fall into halves of matrix operands"
    if place.quantization == "fp8_block" and config.intermediate_size % GROUP:
        return f"blocks of {GROUP} do not divide {config.intermediate_size} gates"
    sizes = (config.hidden_size, config.num_q_heads * config.head_dim, config.intermediate_size)
    uneven = [size for size in sizes if not row_linear_takes(size)]
    return f"rows of {uneven[0]} elements are not whole chunks" if uneven else None


class SingleRowDecoder:
    """Runs the weights of `model`; made after they are loaded."""

    def __init__(self, model: Decoder, *, pdl: bool) -> None:
        """`pdl`: the device has programmatic dependent launch."""
        from kernels.triton.row_attention import row_attention
        from kernels.triton.row_linear import Norm, row_linear

        self._model = model
        self._attention: Any = row_attention
        self._linear: Any = row_linear
        self._norm: Any = Norm
        self._pdl = pdl

    def logits(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """[1, vocab_size] after a step of one token."""
        model = self._model
        residual: Tensor = model.embedding(batch.token_ids)
        for layer, cache in zip(model.layers, caches, strict=True):
            self._run(layer, residual, batch, cache)
        return self._linear(residual, model.head.packed, norm=self._norm_of(model.norm), pdl=self._pdl)

    def _run(self, layer: DecoderLayer, residual: Tensor, batch: ForwardBatch, cache: LayerCache) -> None:
        """Changes `residual`."""
        config, attention, pdl = self._model.config, layer.attention, self._pdl
        qkv = self._linear(residual, attention.qkv.packed, norm=self._norm_of(layer.input_norm), pdl=pdl)
        attended = self._attention(
            qkv,
            *attention.norm_weights,
            config.rms_norm_eps,
            self._model.cos_sin,
            batch.slot_mapping,
            cache.k,
            cache.v,
            batch.attention.block_tables,
            batch.attention.seq_lens,
            config.num_q_heads,
            config.head_dim**-0.5,
            attention.window,
            pdl=pdl,
        )
        self._linear(attended, attention.output.packed, residual=residual, pdl=pdl)
        norm = self._norm_of(layer.middle_norm)
        gated = self._linear(residual, layer.mlp.gate_up.packed, norm=norm, gated=True, pdl=pdl)
        self._linear(gated, layer.mlp.down.packed, residual=residual, pdl=pdl)

    def _norm_of(self, layer: RMSNorm) -> Any:
        return self._norm(layer.weight, layer.eps)
