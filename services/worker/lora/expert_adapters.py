"""Adapters of the experts of one layer: additions to each expert's gate and up projections, and to its down
projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.kernels import Ops
from quire.kernels.reference.low_rank import ExpertAdditions, LowRankAddition
from quire.services.worker.lora.expert_stacks import ExpertSizes
from quire.services.worker.lora.linear_adapters import AdaptedProjection, AdapterCapacity, LayerShape
from quire.services.worker.lora.peft.peft_folder import GATE_UP, ExpertStack, LowRank, PeftFolder
from quire.services.worker.lora.peft.peft_scales import refusal
from quire.services.worker.lora.step_adapter_rows import StepAdapterRows


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    """Projections of every expert as the checkpoint names them, and this rank's part of them."""

    modules: Sequence[str]  # names of the layer's experts in adapters
    projections: Sequence[tuple[str, str, str]]  # gate, up and down of each expert
    sizes: ExpertSizes
    here: range  # experts of this rank
    features: range  # intermediate features of this rank

    @property
    def names(self) -> set[str]:
        return {*self.modules, *(name for names in self.projections for name in names)}

    def has(self, adapter: PeftFolder) -> bool:
        """Tells whether the adapter changes one of the experts."""
        return any(stack.name in self.modules for stack in adapter.stacks) or not self.names.isdisjoint(adapter.modules)

    def shapes_of(self, expert: int) -> tuple[LayerShape, LayerShape]:
        """Returns the shapes of an expert's two products on this rank: gate and up side by side, and down."""
        hidden, size = self.sizes.hidden_size, self.sizes.intermediate_size
        gate, up, down = self.projections[expert]
        pair = [AdaptedProjection(name, size, (self.features,)) for name in (gate, up)]
        whole = AdaptedProjection(down, hidden, (range(hidden),))
        return LayerShape(pair, hidden, range(hidden)), LayerShape([whole], size, self.features)

    def modules_of(self, adapter: PeftFolder, expert: int) -> Mapping[str, LowRank]:
        """Returns one expert's additions by projection name, whether the adapter stores them separately or stacked."""
        gate, up, down = names = self.projections[expert]
        modules = {name: adapter.modules[name] for name in names if name in adapter.modules}
        for stack in self._stacks_of(adapter):
            pairs = self.sizes.pairs(stack, expert, adapter.name)
            modules.update(zip((gate, up) if len(pairs) == 2 else (down,), pairs, strict=True))
        return modules

    def check(self, adapter: PeftFolder) -> None:
        """Raises InvalidArgument for an adapter whose shapes do not fit, that adapts a projection twice, or that uses
        DoRA for experts."""
        parameters = [self.sizes.parameter_of(stack, adapter.name) for stack in self._stacks_of(adapter)]
        if len(set(parameters)) < len(parameters):
            raise refusal(adapter.name, f"{self.modules[0]} has two adapters for {parameters[0]}")
        for expert, (gate, up, down) in enumerate(self.projections):
            covered = [name for parameter in parameters for name in ((gate, up) if parameter == GATE_UP else (down,))]
            duplicates = [name for name in covered if name in adapter.modules]
            if duplicates:
                raise refusal(adapter.name, f"{duplicates[0]} has an adapter of its own and one of all experts")
            scaled = [name for name in (gate, up, down) if _has_magnitude(adapter, name)]
            if scaled:
                raise refusal(adapter.name, f"use_dora is True, which experts do not support: {scaled[0]}")
            for shape in self.shapes_of(expert):
                shape.check(adapter)

    def _stacks_of(self, adapter: PeftFolder) -> list[ExpertStack]:
        """Returns the adapter's stacks that belong to this layer's experts."""
        return [stack for stack in adapter.stacks if stack.name in self.modules]


def _has_magnitude(adapter: PeftFolder, name: str) -> bool:
    pair = adapter.modules.get(name)
    return pair is not None and pair.magnitude is not None


class ExpertAdapters:
    """Additions of this rank's experts, two packed arrays (gate and up, down) at index number * num_experts_here +
    expert; tokens without an adapter are not changed."""

    def __init__(
        self,
        shapes: ExpertShapes,
        capacity: AdapterCapacity,
        step: StepAdapterRows,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes, self._step, self._ops, self._dtype, self._device = shapes, step, ops, dtype, device
        count = capacity.num_adapters * len(shapes.here)
        self._gate_up, self._down = self._packed = [
            ops.prepare_low_rank(
                [None] * count, len(shape.columns), shape.sizes, dtype, most_rank=capacity.max_rank, device=device
            )
            for shape in shapes.shapes_of(shapes.here.start)
        ]

    def check(self, folder: PeftFolder) -> None:
        """Raises InvalidArgument for an adapter that does not fit."""
        self._shapes.check(folder)

    def put(self, number: int, folder: PeftFolder) -> None:
        """Stores this rank's part of a checked adapter under `number`, between two steps; does nothing if it changes no
        expert."""
        if not self._shapes.has(folder):
            return
        for place, expert in enumerate(self._shapes.here, number * len(self._shapes.here)):
            modules = self._shapes.modules_of(folder, expert)
            for packed, shape in zip(self._packed, self._shapes.shapes_of(expert), strict=True):
                pairs = shape.pairs_of(modules)
                if any(pairs):
                    cut = [
                        None if pair is None else shape.cut(index, pair, self._dtype, self._device)
                        for index, pair in enumerate(pairs)
                    ]
                    self._ops.put_low_rank(packed, place, LowRankAddition(cut))

    def drop(self, number: int) -> None:
        """Removes an adapter between two steps, once no step has rows of it."""
        first = number * len(self._shapes.here)
        for packed in self._packed:
            for place in range(first, first + len(self._shapes.here)):
                self._ops.put_low_rank(packed, place, None)

    @property
    def added(self) -> ExpertAdditions | None:
        """Additions to the tokens of the current or recorded step; None if none of them has an adapter."""
        return ExpertAdditions(self._gate_up, self._down, self._step.rows) if self._step.is_active else None
