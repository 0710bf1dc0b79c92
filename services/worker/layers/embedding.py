"""Token ids to vectors, and vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from services.worker.layers.linear import Linear, Part

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.layers.placement import Placement


class Embedding:
    """A row for each token id."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, place: Placement, scale: float = 1.0) -> None:
        """`scale`: what vectors are multiplied by."""
        self._name, self._scale = name, scale
        self._ops = place.ops
        self.table: Tensor = place.empty(vocab_size, hidden_size)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self._name}.weight", self.table

    def finish(self) -> None:
        if self._scale != 1:
            self.table *= self._scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._ops.embed(token_ids, self.table)


class OutputHead(Linear):
    """Logits by a projection of its own."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement) -> None:
        super().__init__([Part("lm_head", vocab_size)], hidden_size, False, place, quantized=False)


class TiedOutputHead:
    """Logits by the embedding's table. Some checkpoints repeat it as lm_head.weight: loader.py passes over that."""

    def __init__(self, embedding: Embedding, place: Placement) -> None:
        self._embedding = embedding
        self._ops = place.ops
        self.packed: Any = None  # as the ops want it, once loaded

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def finish(self) -> None:
        self.packed = self._ops.prepare_linear(self._embedding.table, None)

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.packed)
