"""Projections, several of one input fused into one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.worker.layers.quantization.parts import QuantizedParts, scheme_of

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.layers.placement import Placement


@dataclass(frozen=True, slots=True)
class Part:
    """One projection as the checkpoint has it."""

    name: str  # without ".weight"
    out_features: int
    transposed: bool = False  # [in_features, out_features]


class DenseParts:
    """Parts whose elements are floats in the checkpoint."""

    def __init__(
        self, parts: Sequence[Part], in_features: int, bias: bool, place: Placement, quantization: str
    ) -> None:
        """`quantization`: what becomes of them once they are loaded."""
        self._parts, self._ops, self._quantization = parts, place.ops, quantization
        total = sum(part.out_features for part in parts)
        self._weight: Tensor = place.empty(total, in_features)
        self._bias: Tensor | None = place.empty(total) if bias else None

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        row = 0
        for part in self._parts:
            weight = self._weight.narrow(0, row, part.out_features)
            yield f"{part.name}.weight", weight.t() if part.transposed else weight
            if self._bias is not None:
                yield f"{part.name}.bias", self._bias.narrow(0, row, part.out_features)
            row += part.out_features

    def take_rows(self, rows: Tensor) -> None:
        self._weight.copy_(self._weight[rows])
        if self._bias is not None:
            self._bias.copy_(self._bias[rows])

    def scale(self, factor: float) -> None:
        self._weight *= factor
        if self._bias is not None:
            self._bias *= factor

    def pack(self) -> Any:
        if self._quantization == "none":
            return self._ops.prepare_linear(self._weight, self._bias)
        blocks = self._quantization == "fp8_block"
        return self._ops.prepare_fp8_linear(self._weight, self._bias, blocks=blocks)


class Linear:
    """The outputs of all parts side by side, in their order."""

    def __init__(
        self, parts: Sequence[Part], in_features: int, bias: bool, place: Placement, *, quantized: bool = True
    ) -> None:
        """`quantized`: if the setting says that the model is to be; a checkpoint says it for each of its tensors."""
        scheme = scheme_of(parts, place)
        self._loaded: DenseParts | QuantizedParts
        if scheme is not None:
            self._loaded = QuantizedParts(parts, scheme, in_features, bias, place)
            self._multiply = place.ops.quantized_linear
        else:
            quantization = place.quantization if quantized else "none"
            self._loaded = DenseParts(parts, in_features, bias, place, quantization)
            self._multiply = place.ops.linear if quantization == "none" else place.ops.fp8_linear
        self.packed: Any = None  # as the ops want it, once loaded

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._loaded.destinations()

    def reorder(self, rows: Tensor) -> None:
        """Before finish(): the outputs come in another order, `rows` of the checkpoint's."""
        self._loaded.take_rows(rows)

    def scale(self, factor: float) -> None:
        """Before finish(): all outputs are so many times as large."""
        self._loaded.scale(factor)

    def finish(self) -> None:
        self.packed = self._loaded.pack()
        del self._loaded

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features of all parts]"""
        return self._multiply(x, self.packed)
