"""Decoder layers as called by a model's forward pass, split in two at the KV cache."""

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
    """Normalization over the last axis; with a residual it first adds x to the residual in place and normalizes the
    sum."""

    def destinations(self) -> Iterator[tuple[str, Destination]]: ...

    def finish(self) -> None: ...

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


class DecoderLayer(ABC):
    """Decoder layer: reads the residual stream and returns the update to be added to it.

    A layer does not know the fast paths: a model runs the last layer's second half for sampled tokens only
    (layer_stack.py), a single token runs through fused kernels (single_row.py), and the all-reduce of ranks' partial
    sums may move into the next norm (deferred_all_reduce.py).
    """

    _parts: Sequence[Loadable]

    def __call__(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Runs the layer: `x` [num_tokens, hidden_size] -> the layer's update of the same shape.

        `x` is the previous layer's update, which is added to the residual in place; None for the first layer.
        """
        return self.complete(self.store(x, residual, batch, cache, cos_sin), residual, cache, batch.attention)

    @abstractmethod
    def store(
        self, x: Tensor | None, residual: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor
    ) -> Tensor:
        """Runs the first half, up to the KV cache: adds `x` to the residual, stores keys and values and returns the
        queries [num_tokens, ...].

        A layer with a recurrent state updates it and returns its output in place of queries.
        """

    @abstractmethod
    def complete(self, q: Tensor, residual: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Runs the second half, attention and feed-forward, for the tokens in `metadata`; returns the layer's update.

        `q` and `residual` are the rows of these tokens, which may be fewer than in store().
        """

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()


def normed(norm: Norm, x: Tensor | None, residual: Tensor) -> Tensor:
    """Normalizes the residual stream after adding the previous layer's update `x` to it in place; `x` is None for the
    first layer."""
    return norm(residual) if x is None else norm(x, residual)
