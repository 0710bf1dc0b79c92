"""Gated feed-forward layer whose tensors have names of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.services.worker.layers.feed_forward.activation import gated
from quire.services.worker.layers.linear import Linear, Projection

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement


class NamedGatesMLP:
    """Feed-forward layer without biases: down(activation(gate(x)) * up(x)), its features sharded over ranks."""

    def __init__(
        self,
        names: tuple[str, str, str],
        hidden_size: int,
        intermediate_size: int,
        place: LayerPlacement,
        *,
        activation: str,
    ) -> None:
        """Builds this rank's features without weights. `names`: of gate, up and down."""
        features = place.shard.part(intermediate_size, "intermediate_size")
        gate_up = [Projection(name, intermediate_size, taken=(features,)) for name in names[:2]]
        self._gate_up = Linear(gate_up, hidden_size, False, place)
        self._down = Linear([Projection(names[2], hidden_size)], intermediate_size, False, place, columns=features)
        self._gate = gated(activation, place)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._gate_up.destinations()
        yield from self._down.destinations()

    def finish(self) -> None:
        self._gate_up.finish()
        self._down.finish()

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape, all-reduced."""
        return self._down(self._gate(self._gate_up(x)))
