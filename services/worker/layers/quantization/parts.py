"""Projections of one fused product in a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.quantized_linear import QuantizedWeight
    from quire.services.worker.layers.linear import Projection
    from quire.services.worker.layers.placement import LayerPlacement
    from quire.services.worker.layers.quantization.port import Scheme


class QuantizedParts:
    """Loads quantized projections and concatenates them to one weight, in order.

    Ranks that share a product's rows or columns load whole parts and keep their share of the unpacked weight, because
    the layout of scales and codes depends on the scheme.
    """

    def __init__(
        self,
        parts: Sequence[Projection],
        scheme: Scheme,
        in_features: int,
        bias: bool,
        place: LayerPlacement,
        *,
        columns: range,
    ) -> None:
        """Allocates whole checkpoint tensors of all parts.

        `columns`: input features of this rank. Raises InvalidArgument for transposed parts and for sizes that the
        scheme does not support.
        """
        import torch

        self._columns = columns
        self._scheme, self._parts, self._in_features = scheme, parts, in_features
        self._ops, self._dtype = place.ops, place.dtype
        self._tensors: list[dict[str, Tensor]] = []
        for part in parts:
            if part.transposed:
                raise InvalidArgument(
                    f"model: {part.name} is stored transposed, which is supported only without quantization",
                    field="model",
                )
            scheme.check(part.name, part.out_features, in_features)
            stored = scheme.tensors(part.out_features, in_features)
            self._tensors.append(
                {name: torch.empty(one.shape, dtype=one.dtype, device=place.device) for name, one in stored.items()}
            )
        total = sum(part.out_features for part in parts)
        self._bias: Tensor | None = place.empty(total) if bias else None
        self._unpacked: QuantizedWeight | None = None

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        row = 0
        for part, tensors in zip(self._parts, self._tensors, strict=True):
            for name, tensor in tensors.items():
                yield f"{part.name}.{name}", tensor
            if self._bias is not None:
                yield f"{part.name}.bias", self._bias.narrow(0, row, part.out_features)
            row += part.out_features

    @property
    def weight(self) -> QuantizedWeight:
        """Fused weight of this rank's share; the first access unpacks the loaded tensors and frees them."""
        if self._unpacked is None:
            from quire.kernels.reference.quantized_linear import side_by_side

            unpacked = [
                self._scheme.unpack(tensors, part.out_features, self._in_features)
                for part, tensors in zip(self._parts, self._tensors, strict=True)
            ]
            self._tensors.clear()
            self._unpacked = self._share_of(side_by_side(unpacked, self._bias))
        return self._unpacked

    is_quantized = True

    def dequantized(self) -> Tensor:
        """Returns this rank's weight [out_features, in_features] in the model's dtype."""
        return self.weight.dequantized().to(self._dtype)

    def _share_of(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Returns this rank's rows and columns of the fused weight. Raises InvalidArgument if ranks would share a group
        of columns."""
        import torch

        if any(part.taken for part in self._parts):
            rows, first = [], 0
            for part in self._parts:
                rows += [torch.arange(first + taken.start, first + taken.stop) for taken in part.rows]
                first += part.out_features
            weight = weight.select_rows(torch.cat(rows).to(weight.codes.device))
        if len(self._columns) < self._in_features:
            size = weight.group_size if weight.scales.size(1) > 1 else 1
            if weight.order is not None or self._columns.start % size:
                raise InvalidArgument(
                    f"tensor_parallel_size: {self._parts[0].name} has quantization groups that cannot be split "
                    "between the ranks",
                    field="tensor_parallel_size",
                )
            weight = weight.select_columns(self._columns.start, self._columns.stop)
        return weight

    def select_rows(self, rows: Tensor) -> None:
        """Keeps the outputs `rows` (indices), in that order."""
        self._unpacked = self.weight.select_rows(rows)

    def drop_bias(self) -> None:
        self._unpacked = replace(self.weight, bias=None)

    def scale(self, factors: Tensor, of_bias: Tensor) -> None:
        self._unpacked = self.weight.times(factors, of_bias)

    def pack(self) -> Any:
        return self._ops.prepare_quantized_linear(self.weight, self._dtype)


def scheme_of(parts: Sequence[Projection], place: LayerPlacement) -> Scheme | None:
    """Returns the common quantization scheme of the parts of one product; None if they are not quantized.

    Raises InvalidArgument if their schemes differ.
    """
    if place.checkpoint is None:
        return None
    schemes = [place.checkpoint.scheme(part.name) for part in parts]
    for part, scheme in zip(parts[1:], schemes[1:], strict=True):
        if scheme != schemes[0]:
            raise InvalidArgument(
                f"model: {parts[0].name} and {part.name} are computed as one product, but are quantized differently",
                field="model",
            )
    return schemes[0]
