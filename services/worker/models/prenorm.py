"""Layers as in GPT-2: a LayerNorm before attention, a LayerNorm before a feed-forward without gates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.worker.layers.attention import Attention
from services.worker.layers.layer_norm import LayerNorm
from services.worker.layers.mlp import PlainMLP

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.attention.port import AttentionMetadata
    from services.worker.kv.kv_cache import LayerCache
    from services.worker.models.single_row import RowKernels
    from services.worker.step.forward_batch import ForwardBatch


class PrenormLayer:
    """Made of what the family brings."""

    def __init__(self, first: LayerNorm, attention: Attention, second: LayerNorm, mlp: PlainMLP) -> None:
        self._first, self._attention, self._second, self._mlp = first, attention, second, mlp
        self._parts = (first, attention, second, mlp)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        return self.complete(self.store(x, residual, batch, cache, cos_sin), residual, cache, batch.attention)

    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        normed = self._first(residual) if x is None else self._first(x, residual)
        return self._attention.store(normed, batch, cache, cos_sin)

    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        return self._mlp(self._second(self._attention.attend(q, cache, metadata), residual))

    def run_row(self, kernels: RowKernels, residual: Tensor, batch: ForwardBatch, cache: LayerCache) -> None:
        raise AssertionError("not offered: the fused chain has no LayerNorm")
