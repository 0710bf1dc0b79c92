"""Parameters of recurrent layers besides projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.services.worker.layers.sharding import portion

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement


class HeadRates:
    """Float32 parameter with one number for each head of this rank."""

    def __init__(self, name: str, heads: range, total: int, place: LayerPlacement) -> None:
        """Allocates the values of this rank's `heads`, out of `total`."""
        self._name, self._heads, self._total = name, heads, total
        self.values: Tensor = place.empty(len(heads)).float()

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield self._name, portion(self.values, 0, (self._heads,), self._total)

    def finish(self) -> None:
        """Does nothing: the layer may change the loaded values itself."""


class Convolution:
    """Weights [channels, width] and optional bias of this rank's channels of the short convolution."""

    def __init__(
        self, name: str, taken: tuple[range, ...], total: int, width: int, place: LayerPlacement, *, bias: bool = False
    ) -> None:
        """Allocates the channels `taken` of this rank, out of `total`."""
        self._name, self._taken, self._total = name, taken, total
        num_channels = sum(map(len, taken))
        self._given: Tensor = place.empty(num_channels, 1, width)
        self.weight: Tensor = self._given.squeeze(1)
        self.bias: Tensor | None = place.empty(num_channels) if bias else None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", portion(self._given, 0, self._taken, self._total)
        if self.bias is not None:
            yield f"{self._name}.bias", portion(self.bias, 0, self._taken, self._total)

    def reorder(self, channels: Tensor) -> None:
        """Permutes the channels of weight and bias in place."""
        for part in (self.weight, self.bias):
            if part is not None:
                part.copy_(part[channels])

    def finish(self) -> None:
        """Does nothing: weight and bias are used as loaded."""
