"""Experts of quantized checkpoints with a projection each: dequantized while loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from quire.services.worker.layers.feed_forward.experts import Experts
from quire.services.worker.layers.linear import Projection
from quire.services.worker.layers.quantization.parts import QuantizedParts, scheme_of
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement
    from quire.services.worker.models.config.experts_config import ExpertsConfig


class QuantizedExperts(Experts):
    """Experts of a quantized checkpoint, dequantized by finish(); gate and up projections share a scheme.

    Raises InvalidArgument with expert parallelism and if some experts are not quantized.
    """

    def __init__(self, name: str, hidden_size: int, config: ExpertsConfig, place: LayerPlacement) -> None:
        if place.shard.whole_experts:
            raise InvalidArgument(
                "expert_parallel: not supported for quantized experts, which are split across ranks; leave it out",
                field="expert_parallel",
            )
        super().__init__(name, hidden_size, config, place)
        size, taken = config.intermediate_size, (self._features,)
        self._gates_and_ups: list[QuantizedParts] = []
        self._downs: list[QuantizedParts] = []
        for gate, up, down in map(self._modules, self.here):
            pair = [Projection(gate, size, taken=taken), Projection(up, size, taken=taken)]
            self._gates_and_ups.append(_quantized(pair, hidden_size, range(hidden_size), place))
            self._downs.append(_quantized([Projection(down, hidden_size)], size, self._features, place))

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for parts in (*self._gates_and_ups, *self._downs):
            yield from parts.destinations()

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def finish(self) -> None:
        """Dequantizes each expert into the stacked weights, frees its loaded tensors, and packs the stacks."""
        for stacked, given in ((self._gate_up, self._gates_and_ups), (self._down, self._downs)):
            for expert in stacked:
                expert.copy_(given.pop(0).weight.dequantized())  # frees the loaded tensors
        super().finish()


def _quantized(parts: list[Projection], in_features: int, columns: range, place: LayerPlacement) -> QuantizedParts:
    """Returns loadable parts of one product of an expert. Raises InvalidArgument if they are not quantized or differ in
    their schemes."""
    scheme = scheme_of(parts, place)
    if scheme is None:
        raise InvalidArgument(f"model: {parts[0].name} is not quantized, but other experts are", field="model")
    return QuantizedParts(parts, scheme, in_features, False, place, columns=columns)


def experts_of(name: str, hidden_size: int, config: ExpertsConfig, place: LayerPlacement) -> Experts:
    """Returns experts in the checkpoint's layout: quantized or not, judged by the first expert's gate projection."""
    first = f"{name}.0.{config.names.gate}"
    quantized = place.checkpoint is not None and place.checkpoint.scheme(first) is not None
    return (QuantizedExperts if quantized else Experts)(name, hidden_size, config, place)
