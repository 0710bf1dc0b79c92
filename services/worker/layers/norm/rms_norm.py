"""Root mean square normalization (arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.layers.sharding import Collectives


class RMSNorm:
    """RMS norm; with a residual it first adds x to the residual in place."""

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        place: LayerPlacement,
        *,
        offset: float = 0.0,
        scale: float = 1.0,
        reduce_results: bool = False,
    ) -> None:
        """Builds the norm with the weight (offset + the checkpoint's) * scale.

        `reduce_results`: x is a rank's partial sum, which is all-reduced before it is added to the residual.
        """
        self._collectives = place.shard.collectives if reduce_results else None
        self._name, self._offset, self._scale, self.size = name, offset, scale, size
        self._ops = place.ops
        self.eps = eps
        self.weight: Tensor = place.empty(size)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", self.weight

    def finish(self) -> None:
        if self._offset or self._scale != 1:
            self.weight.copy_((self.weight.float() + self._offset) * self._scale)

    def complete_all_reduce(self, collectives: Collectives | None) -> None:
        """Sets the collectives that reduce x before it is added to the residual; None: x is complete."""
        self._collectives = collectives

    def after_all_reduce(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x, which is reduced already, to the residual in place and returns the normed sum."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalizes x [num_tokens, size]; with `residual` it all-reduces x if it is partial, adds it in place and
        normalizes the sum."""
        if residual is None:
            return self._ops.rms_norm(x, self.weight, self.eps)
        if self._collectives is not None:
            normed = self._collectives.all_reduce_rms_norm(residual, x, self.weight, self.eps)
            if normed is not None:
                return normed
            x = self._collectives.all_reduce(x)
        return self.after_all_reduce(x, residual)
