"""Layer normalization (arXiv 1607.06450)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement


class LayerNorm:
    """Layer norm; with a residual it first adds x to the residual in place."""

    def __init__(
        self, name: str, size: int, eps: float, place: LayerPlacement, *, bias: bool = True, scale: float = 1.0
    ) -> None:
        """Builds the norm; `scale` is a factor of the result, folded into weight and bias."""
        self._name, self._size, self._eps, self._scale = name, size, eps, scale
        self.weight: Tensor = place.empty(size)
        self.bias: Tensor | None = place.empty(size) if bias else None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", self.weight
        if self.bias is not None:
            yield f"{self._name}.bias", self.bias

    def finish(self) -> None:
        if self._scale != 1:
            self.weight *= self._scale
            if self.bias is not None:
                self.bias *= self._scale

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalizes x [num_tokens, size]; with `residual` it adds x to it in place and normalizes the sum."""
        from torch.nn import functional

        if residual is not None:
            x = residual.add_(x)
        return functional.layer_norm(x, (self._size,), self.weight, self.bias, self._eps)
