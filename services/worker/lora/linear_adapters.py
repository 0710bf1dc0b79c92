"""Adapters of one linear layer, which may consist of several projections side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels import Ops
from quire.kernels.reference.low_rank import AdaptedRows, LowRankAddition
from quire.services.worker.lora.base_copies import probes
from quire.services.worker.lora.peft.peft_folder import LowRank, PeftFolder
from quire.services.worker.lora.peft.peft_scales import refusal
from quire.services.worker.lora.step_adapter_rows import StepAdapterRows
from quire.services.worker.lora.weight_norms import Product, WeightNorms


@dataclass(frozen=True, slots=True)
class AdaptedProjection:
    """One projection of a layer in the checkpoint, and this rank's part of its outputs."""

    name: str  # in the checkpoint
    out_features: int
    rows: tuple[range, ...]  # this rank's output features; may exceed the last one if ranks are padded to one size

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Projections of a layer, side by side, and the input features that they share."""

    parts: Sequence[AdaptedProjection]
    in_features: int
    columns: range  # this rank's input features

    @property
    def sizes(self) -> tuple[int, ...]:
        """Output features of each projection on this rank."""
        return tuple(part.num_rows for part in self.parts)

    def pairs_of(self, modules: Mapping[str, LowRank]) -> list[LowRank | None]:
        """Returns the addition of each projection, None where there is none."""
        return [modules.get(part.name) for part in self.parts]

    def adapts(self, adapter: PeftFolder) -> bool:
        """Tells whether the adapter changes a projection."""
        return any(part.name in adapter.modules or part.name in adapter.saved for part in self.parts)

    def check(self, adapter: PeftFolder) -> None:
        """Raises InvalidArgument for additions whose whole matrices do not have the layer's shape; other modules of the
        adapter are not looked at."""
        for part, pair in zip(self.parts, self.pairs_of(adapter.modules), strict=True):
            expected = [part.out_features, self.in_features]
            if pair is not None and [pair.up.size(0), pair.down.size(1)] != expected:
                actual = [pair.up.size(0), pair.down.size(1)]
                raise refusal(adapter.name, f"{part.name} is for a layer of shape {actual}, the model's has {expected}")

    def cut(self, index: int, pair: LowRank, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the down [rank, columns] and up [rows, rank] matrices of projection number
        `index`, on the device; `up` is padded with zero rows to the ranks' common size."""
        part = self.parts[index]
        up = torch.cat([pair.up[rows.start : rows.stop] for rows in part.rows])
        up = functional.pad(up, (0, 0, 0, part.num_rows - len(up)))  # all ranks have the same number of rows
        down = pair.down[:, self.columns.start : self.columns.stop]
        return down.to(device, dtype), up.to(device, dtype)


@dataclass(frozen=True, slots=True)
class AdapterCapacity:
    """Capacity for adapters that every layer allocates when it is loaded."""

    num_adapters: int  # adapter numbers are below this
    max_rank: int
    takes_whole: bool = False  # whether an adapter may replace the weight of a layer that supports it


class LinearAdapters:
    """Owns a linear layer's additions by adapter number, prepared for the kernels; rows of a step without an adapter
    are not changed."""

    def __init__(
        self,
        shape: LayerShape,
        capacity: AdapterCapacity,
        step: StepAdapterRows,
        ops: Ops,
        product: Product,
        *,
        rows: AdaptedRows,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`rows`: the step's rows that the layer reads; `product`: the layer's own outputs."""
        self.shape, self.rows = shape, rows
        self._norms = WeightNorms(product, len(shape.columns), dtype=dtype, device=device)
        self._product = product
        self._capacity, self._step, self._ops, self._dtype, self._device = capacity, step, ops, dtype, device
        self._initial_folders: dict[int, PeftFolder] = {}  # emptied by finish()
        self._orders: list[Tensor] | None = None  # checkpoint index of each output, by projection; None: identical
        self._factors = torch.ones(sum(shape.sizes), device=device)  # by which outputs are multiplied
        self.packed: Any = None  # prepared for the ops once loaded

    def select_rows(self, rows: Tensor) -> None:
        """Reorders the outputs as the layer has reordered its own, each within its projection; `rows`: previous index
        of each output. Called before finish(), as often as the layer reorders."""
        orders, first = [], 0
        for size in self.shape.sizes:
            order = rows[first : first + size].to(self._device) - first
            assert int(order.min()) >= 0, "outputs left their projection"
            assert int(order.max()) < size, "outputs left their projection"
            orders.append(order)
            first += size
        before = self._orders
        self._factors = self._factors[rows.to(self._device)]
        self._orders = orders if before is None else [b[order] for b, order in zip(before, orders, strict=True)]

    def scale(self, factors: float | Tensor) -> None:
        """Multiplies the outputs by `factors`, one for all or [out_features of this rank], as the layer has scaled its
        own; called before finish()."""
        self._factors = self._factors * factors

    def finish(self) -> None:
        """Allocates the packed additions and stores the adapters of the start, once the layer is loaded and its row
        order and scale are final. Raises InvalidArgument for adapters of another base model."""
        self.packed = self._ops.prepare_low_rank(
            [None] * self._capacity.num_adapters,
            len(self.shape.columns),
            self.shape.sizes,
            self._dtype,
            most_rank=self._capacity.max_rank,
            device=self._device,
        )
        for number, folder in self._initial_folders.items():
            self._check_base(folder)
            self.put(number, folder)
        self._initial_folders.clear()

    def check(self, folder: PeftFolder) -> None:
        """Raises InvalidArgument for an adapter that does not fit the layer's shape or, once loaded, its weight."""
        self.shape.check(folder)
        if self.packed is not None:
            self._check_base(folder)

    def put(self, number: int, folder: PeftFolder) -> None:
        """Stores a checked adapter under `number`: before finish() for later, afterwards on the device, between two
        steps. Does nothing then if it has no addition for this layer."""
        if self.packed is None:
            self._initial_folders[number] = folder
        elif any(pairs := self._pairs(folder)):
            self._ops.put_low_rank(self.packed, number, self._update(pairs))

    def drop(self, number: int) -> None:
        """Removes the addition under `number`, if any, between two steps, once no step has rows of it."""
        self._ops.put_low_rank(self.packed, number, None)

    @property
    def is_active(self) -> bool:
        """Whether the current or recorded step may have rows with adapters."""
        return self._step.is_active

    def add(self, x: Tensor, result: Tensor) -> None:
        """Adds to `result` [num_tokens, out_features], in place, the adapters' products with `x` [num_tokens,
        in_features], a step's tokens in order; does nothing if no row has an adapter."""
        if self._step.is_active:
            self.add_to(self.rows, x, result)

    def add_to(self, rows: AdaptedRows, x: Tensor, result: Tensor) -> None:
        """Adds the adapters' products in place as add() does, for other rows than the step's, and unconditionally."""
        self._ops.add_low_rank(x, result, self.packed, rows)

    def _pairs(self, folder: PeftFolder) -> list[LowRank | None]:
        """Returns the adapter's addition of each projection."""
        return self.shape.pairs_of(folder.modules)

    def _update(self, pairs: Sequence[LowRank | None]) -> LowRankAddition:
        """Returns the additions of one adapter cut, ordered and scaled like the layer; for DoRA and replacements with
        the gain and offset of the layer's own outputs."""
        placed = [None if pair is None else self._place_pair(i, pair) for i, pair in enumerate(pairs)]
        if any(pair is not None and pair.replaces for pair in pairs):
            assert len(pairs) == 1, "projections side by side are not replaced"
            return LowRankAddition(placed, torch.zeros(2, sum(self.shape.sizes), device=self._device))
        if not any(pair is not None and pair.magnitude is not None for pair in pairs):
            return LowRankAddition(placed)
        magnitudes = [None if pair is None else self._magnitude(i, pair) for i, pair in enumerate(pairs)]
        gains = self._norms.gains(placed, magnitudes, self.shape.sizes)
        scaled = zip(placed, gains[0].split(list(self.shape.sizes)), strict=True)
        return LowRankAddition(
            [None if pair is None else (pair[0], (pair[1] * gain[:, None]).to(self._dtype)) for pair, gain in scaled],
            gains,
        )

    def _magnitude(self, index: int, pair: LowRank) -> Tensor | None:
        """Returns this rank's DoRA magnitudes of projection number `index` in the layer's order and scale; None if the
        addition has none."""
        if pair.magnitude is None:
            return None
        rows = torch.cat([pair.magnitude[part.start : part.stop] for part in self.shape.parts[index].rows])
        rows = rows.to(self._device)
        return self._factors_of(index).abs() * (rows if self._orders is None else rows[self._orders[index]])

    def _factors_of(self, index: int) -> Tensor:
        factors: Tensor = self._factors.split(list(self.shape.sizes))[index]
        return factors

    def _place_pair(self, index: int, pair: LowRank) -> tuple[Tensor, Tensor]:
        """Returns this rank's down and up matrices of projection number `index` in the layer's order and scale."""
        down, up = self.shape.cut(index, pair, self._dtype, self._device)
        if self._orders is not None:
            up = up[self._orders[index]]
        return down, up.mul_(self._factors_of(index)[:, None])  # in place: cut() has made a copy, which may be large

    def _check_base(self, folder: PeftFolder) -> None:
        """Raises InvalidArgument if a copy of the base weight that came with the adapter differs from the layer's
        weight."""
        name, (shape, rows) = self.shape.parts[0].name, self._weight
        base = folder.bases.get(name)
        if base is None:
            return
        if base.shape != shape:
            text = f"{name}.base_layer.weight has shape {list(base.shape)}, the model's {list(shape)}"
            raise refusal(folder.name, text)
        if not base.equals(self._products_of_base(probes(shape[1]).to(self._device)), rows):
            text = f"{name}.base_layer.weight is not the model's own: only adapters of the served weights are supported"
            raise refusal(folder.name, text)

    def _products_of_base(self, x: Tensor) -> Tensor:
        """Multiplies `x` [n, in_features] with the weight as the checkpoint stores it, without the layer's scale."""
        return self._product(x.to(self._dtype)) / self._factors

    @property
    def _weight(self) -> tuple[tuple[int, int], range]:
        """Shape of the whole weight, and this rank's rows of it."""
        part = self.shape.parts[0]
        return (part.out_features, self.shape.in_features), part.rows[0]
