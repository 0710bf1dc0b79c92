"""Linear layers, with several projections of one input fused into one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.services.worker.layers.quantization.parts import QuantizedParts, scheme_of
from quire.services.worker.layers.sharding import portion
from quire.services.worker.layers.storage import deallocate

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.lora.adapters import AdapterManager
    from quire.services.worker.lora.linear_adapters import LayerShape, LinearAdapters


@dataclass(frozen=True, slots=True)
class Projection:
    """Projection as stored in the checkpoint: name, size, and the output features that this rank takes."""

    name: str  # without ".weight"
    out_features: int
    transposed: bool = False  # [in_features, out_features]
    taken: tuple[range, ...] = ()  # output features of this rank; empty: all
    has_bias: bool = True  # False: the checkpoint has no bias for it, although it is fused with others that have one

    @property
    def rows(self) -> tuple[range, ...]:
        return self.taken or (range(self.out_features),)

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))


class DenseParts:
    """Projections with floating-point elements in the checkpoint, loaded into one weight.

    May be quantized to fp8 when packed.
    """

    def __init__(
        self,
        parts: Sequence[Projection],
        in_features: int,
        bias: bool,
        place: LayerPlacement,
        *,
        columns: range,
        quantization: str,
    ) -> None:
        """Allocates this rank's weight and bias.

        `columns`: input features of this rank. `quantization`: applied by pack(); other than "none", the weight has
        memory only while its layer is loaded.
        """
        self._parts, self._ops, self._quantization = parts, place.ops, quantization
        self._in_features, self._columns = in_features, columns
        total = sum(part.num_rows for part in parts)
        self._weight: Tensor = place.empty(total, len(columns))
        self._bias: Tensor | None = place.empty(total) if bias else None
        self._destinations = tuple(self._views())
        if quantization != "none":
            deallocate(self._weight)  # allocated only while its layer is loaded (models/loading/layer_storage.py)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._destinations

    def _views(self) -> Iterator[tuple[str, Destination]]:
        """Yields each tensor's name and its rows of the fused weight or bias as its destination."""
        row = 0
        for part in self._parts:
            weight, dims = self._weight.narrow(0, row, part.num_rows), (0, 1)
            if part.transposed:
                weight, dims = weight.t(), (1, 0)
            yield f"{part.name}.weight", self._portion(weight, part, dims)
            if self._bias is not None:
                bias = self._bias.narrow(0, row, part.num_rows)
                if part.has_bias:
                    yield f"{part.name}.bias", portion(bias, 0, part.rows, part.out_features)
                else:
                    bias.zero_()
            row += part.num_rows

    def _portion(self, weight: Tensor, part: Projection, dims: tuple[int, int]) -> Destination:
        """Returns the destination of a part; `dims`: dimensions of outputs and inputs."""
        outputs, inputs = dims
        if len(self._columns) < self._in_features:
            return portion(weight, inputs, (self._columns,), self._in_features)
        return portion(weight, outputs, part.rows, part.out_features)

    @property
    def is_quantized(self) -> bool:
        """Whether pack() returns a quantized weight, for ops.quantized_linear."""
        return self._quantization != "none"

    def dequantized(self) -> Tensor:
        """Returns this rank's weight [out_features, in_features] in the model's dtype."""
        return self._weight

    def drop_bias(self) -> None:
        """Sets the bias to zero, on ranks that must not add it."""
        if self._bias is not None:
            self._bias.zero_()

    def select_rows(self, rows: Tensor) -> None:
        """Permutes the outputs of weight and bias in place."""
        self._weight.copy_(self._weight[rows])
        if self._bias is not None:
            self._bias.copy_(self._bias[rows])

    def scale(self, factors: Tensor, of_bias: Tensor) -> None:
        """Multiplies outputs in place: the weight's rows by `factors`, the bias by `of_bias`, [out_features] each."""
        self._weight *= factors.unsqueeze(1)
        if self._bias is not None:
            self._bias *= of_bias

    def pack(self) -> Any:
        """Returns the weight in the kernels' layout, quantized to fp8 (by row or by block) if the setting says so."""
        if self._quantization == "none":
            return self._ops.prepare_linear(self._weight, self._bias)
        from quire.kernels.reference.fp8_weight import quantize_to_fp8

        weight = quantize_to_fp8(self._weight, self._bias, blocks=self._quantization == "fp8_block")
        return self._ops.prepare_quantized_linear(weight, self._weight.dtype)


def by_rows(factors: Sequence[float], sizes: Sequence[int]) -> Tensor:
    """Repeats each factor for its number of outputs: float32 [sum of sizes]."""
    import torch

    return torch.tensor(factors, dtype=torch.float32).repeat_interleave(torch.tensor(sizes))


def parts_of(
    parts: Sequence[Projection], in_features: int, bias: bool, place: LayerPlacement, *, columns: range, quantized: bool
) -> DenseParts | QuantizedParts:
    """Returns loadable parts in the checkpoint's format, quantized or dense.

    `quantized`: dense weights are subject to the setting `quantization`. Raises InvalidArgument if the parts' schemes
    differ.
    """
    scheme = scheme_of(parts, place)
    if scheme is not None:
        return QuantizedParts(parts, scheme, in_features, bias, place, columns=columns)
    quantization = place.quantization if quantized else "none"
    return DenseParts(parts, in_features, bias, place, columns=columns, quantization=quantization)


class Linear:
    """Fused projections of one input, outputs concatenated in order, with adapters and the all-reduce.

    A rank holds a part of the output features (`Projection.taken`), a part of the input features (`columns`), or
    everything.
    """

    def __init__(
        self,
        parts: Sequence[Projection],
        in_features: int,
        bias: bool,
        place: LayerPlacement,
        *,
        quantized: bool = True,
        columns: range | None = None,
        reduce_results: bool = True,
    ) -> None:
        """Builds this rank's part.

        `quantized`: subject to the setting `quantization`; quantized checkpoints decide per tensor. `columns`: input
        features of this rank; None: all. With partial inputs the results are all-reduced unless `reduce_results` is
        False.
        """
        columns = columns or range(in_features)
        self._is_partial, self._device = len(columns) < in_features, place.device
        self._shard, self._reduce_results = place.shard, reduce_results and self._is_partial
        self.out_features = sum(part.num_rows for part in parts)  # on this rank
        self._loaded = parts_of(parts, in_features, bias, place, columns=columns, quantized=quantized)
        self._multiply = place.ops.quantized_linear if self._loaded.is_quantized else place.ops.linear
        self.packed: Any = None  # packed by the ops once loaded
        # Adapter weights; None: no adapters.
        self.adapters: LinearAdapters | None = None
        if place.adapters is not None:
            self.adapters = self._adapters_of(place.adapters, adapted_shape(parts, in_features, columns))

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._loaded.destinations()

    def reorder(self, rows: Tensor) -> None:
        """Permutes the outputs; `rows` are indices of the checkpoint's order. Call before finish()."""
        self._loaded.select_rows(rows)
        if self.adapters is not None:
            self.adapters.select_rows(rows)

    def scale(self, factor: float | Tensor, of_input: float = 1.0) -> None:
        """Scales outputs by `factor`, a number or [out_features], and inputs by `of_input`, which does not affect
        biases.

        Call before finish().
        """
        import torch

        of_bias = torch.as_tensor(factor, dtype=torch.float32, device=self._device).expand(self.out_features)
        self._loaded.scale(of_bias * of_input, of_bias)
        if self.adapters is not None:
            self.adapters.scale(of_bias * of_input)

    def finish(self) -> None:
        """Packs the loaded weights for the kernels and frees them; with partial inputs only rank 0 keeps the bias."""
        if self._is_partial and self._shard.rank:
            self._loaded.drop_bias()  # added by one rank alone
        self.packed = self._loaded.pack()
        del self._loaded
        if self.adapters is not None:
            self.adapters.finish()

    def defer_all_reduce(self, *, deferred: bool = True) -> None:
        """Leaves the output a partial sum that the caller reduces (`deferred`), or makes it complete again."""
        self._reduce_results = self._is_partial and not deferred

    def _adapters_of(self, adapters: AdapterManager, shape: LayerShape) -> LinearAdapters | None:
        return adapters.for_linear(shape, self._product)

    def _product(self, x: Tensor) -> Tensor:
        """Multiplies this rank's weight, without adapters and without the all-reduce."""
        result: Tensor = self._multiply(x, self.packed)
        return result

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies x [num_tokens, in_features of this rank] -> [num_tokens, out_features of all parts], including
        adapters.

        Partial sums are all-reduced unless deferred, overlapped with the product in steps without adapters.
        """
        is_adapted = (
            self.adapters is not None and self.adapters.is_active
        )  # adapters index rows by their position in the step
        if self._reduce_results and not is_adapted:
            return self._shard.collectives.overlapped_all_reduce(x, self._product)
        result = self._product(x)
        if self.adapters is not None:
            self.adapters.add(x, result)
        return self._shard.collectives.all_reduce(result) if self._reduce_results else result


def adapted_shape(parts: Sequence[Projection], in_features: int, columns: range) -> LayerShape:
    """Returns names and sizes of a layer's projections, and this rank's part of them, for adapters."""
    from quire.services.worker.lora.linear_adapters import AdaptedProjection, LayerShape

    adapted = [AdaptedProjection(part.name, part.out_features, part.rows) for part in parts]
    return LayerShape(adapted, in_features, columns)
