"""Decoder layers: what a model's forward pass calls, cut in two at the KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, Loadable


class Norm(Protocol):
    """Normalises x; called with a residual, it first adds x to that, in place."""

    def destinations(self) -> Iterator[tuple[str, Destination]]: ...

    def finish(self) -> None: ...

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


class DecoderLayer(ABC):
    """Reads the residual stream and returns what is to be added to it.

    A layer does not know the fast paths: a model runs the last layer's second half for sampled tokens only
    (layer_stack.py), a single token goes through the layer's parts in fused kernels (single_row.py), and the all-reduce
    of ranks' sums may move into the norm after it (deferred_all_reduce.py).
    """

    _parts: Sequence[Loadable]

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """`x` [num_tokens, hidden_size]: what the layer before adds to the residual (updated in place), None before
        the first layer -> what this one adds."""
        return self.complete(self.store(x, residual, batch, cache, cos_sin), residual, cache, batch.attention)

    @abstractmethod
    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """The first half, which later steps need: keys and values go to the cache. Returns the queries."""

    @abstractmethod
    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """The second half, for the tokens in `metadata`."""

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()


def normed(norm: Norm, x: Tensor | None, residual: Tensor) -> Tensor:
    """Normalises the residual stream, with `x` added to it where a layer came before."""
    return norm(residual) if x is None else norm(x, residual)
