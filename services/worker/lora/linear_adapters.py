"""What adapters add to one linear layer, whose parts may be several projections side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import Ops
from services.worker.lora.peft_folder import LowRank, PeftFolder, refusal
from services.worker.lora.step_rows import StepRows


@dataclass(slots=True)
class FusedLowRank:
    """Of all parts of a layer: (x @ down.T) @ up.T"""

    down: Tensor  # [ranks of its parts one after the other, in_features]
    up: Tensor  # [out_features of all parts, the same ranks]: blocks along the diagonal


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The projections of a layer and their out_features, and the in_features that they share."""

    parts: Sequence[tuple[str, int]]
    in_features: int

    @property
    def out_features(self) -> int:
        return sum(size for _, size in self.parts)

    def pairs_of(self, modules: Mapping[str, LowRank]) -> list[LowRank | None]:
        """Of each projection."""
        return [modules.get(name) for name, _ in self.parts]

    def check(self, adapter: PeftFolder) -> None:
        """Raises InvalidArgument for shapes that do not fit."""
        for (name, size), pair in zip(self.parts, self.pairs_of(adapter.modules), strict=True):
            if pair is not None and (pair.down.size(1), pair.up.size(0)) != (self.in_features, size):
                have, want = [pair.up.size(0), pair.down.size(1)], [size, self.in_features]
                raise refusal(adapter.name, f"{name} is for a layer of shape {have}, the model's has {want}")


class LinearAdapters:
    """By adapter's number. Rows of a step that have none are left as they are."""

    def __init__(
        self, shape: LayerShape, capacity: int, step: StepRows, ops: Ops, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`capacity`: numbers are below that."""
        self.shape = shape
        self._capacity, self._step, self._ops, self._dtype, self._device = capacity, step, ops, dtype, device
        self._by_number: dict[int, FusedLowRank] = {}
        self._rows: Tensor | None = None  # of the checkpoint's outputs, in the layer's order; None: the same
        self._factor = 1.0  # that all outputs are multiplied by
        self._is_finished = False
        self._packed: Any = None  # as the ops want it, once loaded; None: tokens are gathered by adapter

    def take_rows(self, rows: Tensor) -> None:
        self._rows = rows if self._rows is None else self._rows[rows]

    def scale(self, factor: float) -> None:
        self._factor *= factor

    def finish(self) -> None:
        """Rows and scale are what they will be."""
        self._is_finished = True
        self._by_number = {number: self._as_loaded(pair) for number, pair in self._by_number.items()}
        if self._step.rows is None:
            return
        given = (self._by_number.get(number) for number in range(self._capacity))
        sizes = self.shape.in_features, self.shape.out_features, self._dtype
        self._packed = self._ops.prepare_low_rank([pair and (pair.down, pair.up) for pair in given], *sizes)
        self._by_number.clear()

    def put(self, number: int, modules: Mapping[str, LowRank]) -> None:
        """An adapter whose shapes have been checked, before finish() or later, between two steps."""
        given = self.shape.pairs_of(modules)
        if not any(given):
            return
        fused = fuse(given, [size for _, size in self.shape.parts], self.shape.in_features)
        pair = FusedLowRank(*(part.to(self._device, self._dtype) for part in (fused.down, fused.up)))
        if self._is_finished:
            pair = self._as_loaded(pair)
        if self._packed is None:
            self._by_number[number] = pair
        else:
            self._ops.put_low_rank(self._packed, number, (pair.down, pair.up))

    def drop(self, number: int) -> None:
        """Between two steps, none of which has rows of this adapter any more."""
        if self._packed is None:
            self._by_number.pop(number, None)
        else:
            self._ops.put_low_rank(self._packed, number, None)

    def add(self, x: Tensor, result: Tensor) -> None:
        """To `result` [num_tokens, out_features], of x [num_tokens, in_features]: a step's tokens, in its order."""
        if self._packed is not None:
            self._ops.add_low_rank(x, result, self._packed, self._step.rows)
            return
        for number, tokens in self._step.groups:
            low_rank = self._by_number.get(number)
            if low_rank is None:
                continue
            of_group = x if tokens is None else x.index_select(0, tokens)
            delta = torch.nn.functional.linear(of_group @ low_rank.down.t(), low_rank.up)
            if tokens is None:
                result += delta
            else:
                result.index_add_(0, tokens, delta)

    def _as_loaded(self, pair: FusedLowRank) -> FusedLowRank:
        up = pair.up if self._rows is None else pair.up[self._rows]
        return FusedLowRank(pair.down, up if self._factor == 1.0 else up * self._factor)


def fuse(parts: Sequence[LowRank | None], sizes: Sequence[int], in_features: int) -> FusedLowRank:
    """`parts`: of each projection, None where the adapter leaves it alone; `sizes`: its out_features."""
    given = [part for part in parts if part is not None]
    up = torch.zeros(sum(sizes), sum(part.down.size(0) for part in given))
    row = column = 0
    for part, size in zip(parts, sizes, strict=True):
        if part is not None:
            rank = part.down.size(0)
            up[row : row + size, column : column + rank] = part.up
            column += rank
        row += size
    return FusedLowRank(torch.cat([part.down for part in given]), up)
