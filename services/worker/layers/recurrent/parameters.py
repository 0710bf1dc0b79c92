"""Parameters that recurrent layers have beside their projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.layers.placement import Destination, Placement


class HeadRates:
    """A parameter for each head, in float32."""

    def __init__(self, name: str, num_heads: int, place: Placement) -> None:
        self._name = name
        self.values: Tensor = place.empty(num_heads).float()

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield self._name, self.values

    def finish(self) -> None:
        """Used as it is."""


class Convolution:
    """Its weights."""

    def __init__(self, name: str, num_channels: int, width: int, place: Placement, *, bias: bool = False) -> None:
        self._name = name
        self._given: Tensor = place.empty(num_channels, 1, width)
        self.weight: Tensor = self._given.squeeze(1)
        self.bias: Tensor | None = place.empty(num_channels) if bias else None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", self._given
        if self.bias is not None:
            yield f"{self._name}.bias", self.bias

    def reorder(self, channels: Tensor) -> None:
        for part in (self.weight, self.bias):
            if part is not None:
                part.copy_(part[channels])

    def finish(self) -> None:
        """Used as they are."""
