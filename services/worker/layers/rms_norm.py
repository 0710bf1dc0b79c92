"""Root mean square normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.layers.placement import Placement


class RMSNorm:
    """Called with a residual, it first adds x to that, in place."""

    def __init__(self, name: str, size: int, eps: float, place: Placement) -> None:
        self._name = name
        self._ops = place.ops
        self.eps = eps
        self.weight: Tensor = place.empty(size)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self._name}.weight", self.weight

    def finish(self) -> None:
        """The weight is used as it is."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return self._ops.rms_norm(x, self.weight, self.eps)
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
