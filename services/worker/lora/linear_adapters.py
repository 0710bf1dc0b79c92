"""What adapters add to one linear layer, whose parts may be several projections side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import Ops
from kernels.reference.low_rank import AdaptedRows, LowRankAddition
from services.worker.lora.peft_folder import LowRank, PeftFolder
from services.worker.lora.peft_scales import refusal
from services.worker.lora.step_rows import StepRows
from services.worker.lora.weight_norms import Product, WeightNorms


@dataclass(frozen=True, slots=True)
class AdaptedProjection:
    """One of a layer, whole, and what this rank has of it."""

    name: str  # in the checkpoint
    out_features: int
    rows: tuple[range, ...]  # of its output features

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows))


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The projections of a layer, and the input features that they share."""

    parts: Sequence[AdaptedProjection]
    in_features: int
    columns: range  # of the input features, those that this rank gets

    @property
    def sizes(self) -> tuple[int, ...]:
        """Output features of each projection, those of this rank."""
        return tuple(part.num_rows for part in self.parts)

    def pairs_of(self, modules: Mapping[str, LowRank]) -> list[LowRank | None]:
        """Of each projection."""
        return [modules.get(part.name) for part in self.parts]

    def check(self, adapter: PeftFolder) -> None:
        """Raises InvalidArgument for shapes that do not fit."""
        for part, pair in zip(self.parts, self.pairs_of(adapter.modules), strict=True):
            want = [part.out_features, self.in_features]
            if pair is not None and [pair.up.size(0), pair.down.size(1)] != want:
                have = [pair.up.size(0), pair.down.size(1)]
                raise refusal(adapter.name, f"{part.name} is for a layer of shape {have}, the model's has {want}")


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """For adapters, in every layer."""

    num_adapters: int  # numbers are below that
    most_rank: int


class LinearAdapters:
    """By adapter's number. Rows of a step that have none are left as they are."""

    def __init__(
        self,
        shape: LayerShape,
        room: AdapterRoom,
        step: StepRows,
        ops: Ops,
        product: Product,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`product`: the layer's own."""
        self.shape = shape
        self._norms = WeightNorms(product, len(shape.columns), dtype=dtype, device=device)
        self._room, self._step, self._ops, self._dtype, self._device = room, step, ops, dtype, device
        self._first: dict[int, Mapping[str, LowRank]] = {}  # until finish()
        self._orders: list[Tensor] | None = None  # of each projection's outputs, the checkpoint's; None: the same
        self._factors = torch.ones(sum(shape.sizes), device=device)  # that outputs are multiplied by
        self.packed: Any = None  # as the ops want it, once loaded

    def take_rows(self, rows: Tensor) -> None:
        """Outputs come in another order, but stay in their projection."""
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

    def scale(self, factors: Tensor) -> None:
        """[out_features of this rank]"""
        self._factors = self._factors * factors

    def finish(self) -> None:
        """Rows and scale are what they will be."""
        updates = [self._update(self._first.get(number)) for number in range(self._room.num_adapters)]
        sizes = self.shape.sizes
        self.packed = self._ops.prepare_low_rank(
            updates,
            len(self.shape.columns),
            sizes,
            self._dtype,
            most_rank=self._room.most_rank,
            device=self._device,
        )
        self._first.clear()

    def put(self, number: int, modules: Mapping[str, LowRank]) -> None:
        """An adapter whose shapes have been checked, before finish() or later, between two steps."""
        if self.packed is None:
            self._first[number] = modules
        elif any(self.shape.pairs_of(modules)):
            self._ops.put_low_rank(self.packed, number, self._update(modules))

    def drop(self, number: int) -> None:
        """Between two steps, none of which has rows of this adapter any more."""
        self._ops.put_low_rank(self.packed, number, None)

    @property
    def is_active(self) -> bool:
        """Whether the step that is computed, or recorded, now may have rows with adapters."""
        return self._step.is_active

    @property
    def rows(self) -> AdaptedRows:
        return self._step.rows

    def add(self, x: Tensor, result: Tensor) -> None:
        """To `result` [num_tokens, out_features], of x [num_tokens, in_features]: a step's tokens, in its order."""
        if self._step.is_active:
            self._ops.add_low_rank(x, result, self.packed, self._step.rows)

    def _update(self, modules: Mapping[str, LowRank] | None) -> LowRankAddition | None:
        """As the layer is cut, ordered and scaled."""
        pairs = self.shape.pairs_of(modules or {})
        if not any(pairs):
            return None
        placed = [None if pair is None else self._of_part(i, pair) for i, pair in enumerate(pairs)]
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
        if pair.magnitude is None:
            return None
        rows = torch.cat([pair.magnitude[taken.start : taken.stop] for taken in self.shape.parts[index].rows])
        rows = rows.to(self._device)
        return self._factors_of(index).abs() * (rows if self._orders is None else rows[self._orders[index]])

    def _factors_of(self, index: int) -> Tensor:
        factors: Tensor = self._factors.split(list(self.shape.sizes))[index]
        return factors

    def _of_part(self, index: int, pair: LowRank) -> tuple[Tensor, Tensor]:
        part, columns = self.shape.parts[index], self.shape.columns
        rows = torch.cat([pair.up[taken.start : taken.stop] for taken in part.rows])
        up = rows.to(self._device, self._dtype)
        if self._orders is not None:
            up = up[self._orders[index]]
        down = pair.down[:, columns.start : columns.stop].to(self._device, self._dtype)
        return down, (up * self._factors_of(index)[:, None]).to(self._dtype)
