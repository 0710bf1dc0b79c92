"""The adapters that a worker serves: kept on the device, chosen by sequences, there from the start or loaded later.

On the CPU all adapters of a step are one call for each layer, which a tape records as well. Elsewhere a step in which
some sequence has an adapter is launched kernel by kernel, as a model without graphs is; others cost what they cost
without adapters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels import Ops
from kernels.reference.low_rank import AdaptedRows
from services.worker.lora.linear_adapters import LayerShape, LinearAdapters
from services.worker.lora.peft_folder import PeftFolder, refusal
from services.worker.lora.step_rows import StepRows
from shared.adapter_contents import AdapterId
from shared.columns import I32
from shared.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from services.worker.limits import Limits
    from services.worker.step.admission import Admission
    from services.worker.step.step_inputs import StepInputs

NO_ADAPTER = -1

AdapterGroups = list[tuple[int, I32 | None]]  # numbers, each with its tokens (None: all of the step's)


@dataclass(frozen=True, slots=True)
class Held:
    """An adapter on the device."""

    id: AdapterId
    path: str
    number: int


class Adapters:
    """Numbered from 0; a number that is free is taken again. Used by the device's thread."""

    def __init__(
        self,
        folders: Sequence[PeftFolder],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        limits: Limits,
        *,
        room: int = 0,
    ) -> None:
        """`folders`: those that are there from the start, by ascending names; `room`: how many there may be while the
        worker runs; 0: no others come."""
        self._ops, self._dtype, self._device = ops, dtype, device
        self._capacity = max(room, len(folders))
        self.max_adapters = self._capacity if room else 0
        self._first = list(folders)  # until the model is built
        self._held: dict[AdapterId, Held] = {}  # of one name the newest last
        self._layers: list[LinearAdapters] = []
        self._taken: set[str] = set()  # projections that layers have asked for
        self._of_slot = np.full(limits.max_num_seqs, NO_ADAPTER, dtype=np.int32)
        self._num_live = 0
        for number, folder in enumerate(folders):
            self._hold(folder, folder.digest(), number)
        most = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.step = StepRows(AdaptedRows.none(most) if device.type == "cpu" else None)

    def of_linear(self, parts: Sequence[tuple[str, int]], in_features: int) -> LinearAdapters | None:
        """What they add to a layer of these projections and their out_features; None: nothing, ever. Raises
        InvalidArgument for shapes that do not fit."""
        shape = LayerShape(parts, in_features)
        self._taken.update(name for name, _ in parts)
        if not self.max_adapters and not any(any(shape.pairs_of(folder.modules)) for folder in self._first):
            return None
        layer = LinearAdapters(shape, self._capacity, self.step, self._ops, dtype=self._dtype, device=self._device)
        for number, folder in enumerate(self._first):
            shape.check(folder)
            layer.put(number, folder.modules)
        self._layers.append(layer)
        return layer

    def check_complete(self) -> None:
        """Once the model is built: every projection of every adapter has found its layer."""
        for folder in self._first:
            self._check_layers(folder)
        self._first.clear()

    def held(self) -> list[Held]:
        """By ascending names, of one name the newest last."""
        return sorted(self._held.values(), key=lambda held: held.id.name)

    def add(self, folder: PeftFolder, digest: bytes) -> None:
        """Once the model is loaded, between two steps. Raises InvalidArgument for one that does not fit the model,
        ResourceExhausted where there is no room."""
        known = self._held.pop(AdapterId(folder.name, digest), None)
        if known is not None:
            self._held[known.id] = known  # it is the newest again
            return
        self._check_layers(folder)
        for layer in self._layers:
            layer.shape.check(folder)
        numbers = {held.number for held in self._held.values()}
        number = next((number for number in range(self._capacity) if number not in numbers), None)
        if number is None:
            text = f"lora: {folder.name}: there are {self._capacity} adapters, which is max_loras"
            raise ResourceExhausted(text, field="lora")
        for layer in self._layers:
            layer.put(number, folder.modules)
        self._hold(folder, digest, number)

    def remove(self, adapter: AdapterId) -> None:
        """Between two steps. Sequences that went through it have ended; slots of theirs may still be live."""
        held = self._held.pop(adapter, None)
        if held is None:
            return
        ended = self._of_slot == held.number
        self._num_live -= int(np.count_nonzero(ended))
        self._of_slot[ended] = NO_ADAPTER
        for layer in self._layers:
            layer.drop(held.number)

    def admit(self, slot: int, admission: Admission) -> None:
        if not admission.adapter:
            return
        held = self._find(admission.adapter, admission.adapter_digest)
        if held is None:
            known = ", ".join(dict.fromkeys(held.id.name for held in self.held())) or "none"
            raise InvalidArgument(
                f"adapter: {admission.adapter!r} does not exist on this worker; there are {known}", field="adapter"
            )
        self._of_slot[slot] = held.number
        self._num_live += 1

    def release(self, slot: int) -> None:
        self._num_live -= int(self._of_slot[slot] != NO_ADAPTER)
        self._of_slot[slot] = NO_ADAPTER

    def write_rows(self, inputs: StepInputs) -> None:
        """Of the next step, on the CPU."""
        rows = self.step.rows
        assert rows is not None
        count = 0
        if self._num_live:
            of_tokens = self._of_slot[inputs.slots]
            if inputs.num_tokens != inputs.num_rows:
                of_tokens = np.repeat(of_tokens, np.diff(inputs.query_start))
            order = np.argsort(of_tokens, kind="stable")[np.count_nonzero(of_tokens == NO_ADAPTER) :]
            count = len(order)
            rows.tokens.numpy()[:count] = order
            rows.numbers.numpy()[:count] = of_tokens[order]
        rows.count.fill_(count)

    def groups(self, inputs: StepInputs) -> AdapterGroups:
        """Of a step; empty if no sequence in it has an adapter."""
        if not self._num_live:
            return []
        numbers = self._of_slot[inputs.slots]
        chosen = np.unique(numbers)
        if len(chosen) == 1:
            return [] if chosen[0] == NO_ADAPTER else [(int(chosen[0]), None)]
        of_tokens = np.repeat(numbers, np.diff(inputs.query_start))
        return [
            (int(number), np.flatnonzero(of_tokens == number).astype(np.int32))
            for number in chosen.tolist()
            if number != NO_ADAPTER
        ]

    def _hold(self, folder: PeftFolder, digest: bytes, number: int) -> None:
        adapter = AdapterId(folder.name, digest)
        self._held[adapter] = Held(adapter, os.path.realpath(folder.folder), number)

    def _find(self, name: str, digest: bytes) -> Held | None:
        """Of any content if `digest` is empty: the newest."""
        if digest:
            return self._held.get(AdapterId(name, digest))
        return next((held for held in reversed(self.held()) if held.id.name == name), None)

    def _check_layers(self, folder: PeftFolder) -> None:
        lost = sorted(folder.modules.keys() - self._taken)
        if lost:
            text = f"{lost[0]} is not a linear layer of this model that can have an adapter"
            more = f" ({len(lost)} such)" if len(lost) > 1 else ""
            raise refusal(folder.name, text + more)
