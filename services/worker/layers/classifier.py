"""Output layer of models that classify whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import LayerPlacement


class Classifier:
    """Linear classifier of a single vector, with a row of float32 weights per class and no bias."""

    def __init__(self, name: str, num_classes: int, hidden_size: int, place: LayerPlacement) -> None:
        self._name = name
        self.num_classes = num_classes
        self._weight: Tensor = place.empty(num_classes, hidden_size)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self._name}.weight", self._weight

    def finish(self) -> None:
        self._weight = self._weight.float()

    def __call__(self, vector: Tensor) -> Tensor:
        """Computes the scores: float32 [hidden_size] -> float32 [num_classes]."""
        return self._weight @ vector
