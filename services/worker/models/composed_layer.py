"""What layers have in common that are made of a few parts and not in the fused chain of single rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, Loadable
    from quire.services.worker.models.single_row import RowKernels


class ComposedLayer(ABC):
    """A Layer (causal_lm.py): a family says what comes before the cache and what behind it."""

    _parts: Sequence[Loadable]

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        return self.complete(self.store(x, residual, batch, cache, cos_sin), residual, cache, batch.attention)

    @abstractmethod
    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor: ...

    @abstractmethod
    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor: ...

    def run_row(self, kernels: RowKernels, residual: Tensor, batch: ForwardBatch, cache: LayerCache) -> None:
        raise AssertionError("not offered: the family's single_row says why")
