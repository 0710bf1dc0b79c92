"""The adapters that a worker serves: read when it starts, kept on the device, chosen by sequences.

A step in which some sequence has an adapter is launched kernel by kernel, as a model without graphs and tapes is;
others cost what they cost without adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.lora import peft_folder
from services.worker.lora.linear_adapters import LinearAdapters, fuse
from services.worker.lora.peft_folder import PeftFolder, refusal
from services.worker.lora.step_rows import StepRows
from shared.columns import I32
from shared.errors import InvalidArgument

if TYPE_CHECKING:
    from services.worker.step.admission import Admission
    from services.worker.step.step_inputs import StepInputs

NO_ADAPTER = -1

AdapterGroups = list[tuple[int, I32 | None]]  # numbers, each with its tokens (None: all of the step's)


class Adapters:
    """Numbered in the order of their names."""

    def __init__(self, folders: Sequence[PeftFolder], dtype: torch.dtype, device: torch.device, num_slots: int) -> None:
        self._folders, self._dtype, self._device = folders, dtype, device
        self._numbers = {folder.name: number for number, folder in enumerate(folders)}
        self._taken: set[str] = set()  # projections that layers have asked for
        self._of_slot = np.full(num_slots, NO_ADAPTER, dtype=np.int32)
        self._num_live = 0
        self.step = StepRows()

    @classmethod
    def read(cls, lora: Mapping[str, str], dtype: torch.dtype, device: torch.device, num_slots: int) -> Adapters | None:
        """`lora`: folders by name; None if there are none. Raises InvalidArgument."""
        folders = [peft_folder.read(name, Path(folder)) for name, folder in sorted(lora.items())]
        return cls(folders, dtype, device, num_slots) if folders else None

    def of_linear(self, parts: Sequence[tuple[str, int]], in_features: int) -> LinearAdapters | None:
        """What they add to a layer of these projections and their out_features; None: nothing. Raises
        InvalidArgument for shapes that do not fit."""
        names = [name for name, _ in parts]
        self._taken.update(names)
        found = {}
        for number, adapter in enumerate(self._folders):
            given = [adapter.modules.get(name) for name in names]
            if not any(given):
                continue
            for (name, size), pair in zip(parts, given, strict=True):
                if pair is not None and (pair.down.size(1), pair.up.size(0)) != (in_features, size):
                    have, want = [pair.up.size(0), pair.down.size(1)], [size, in_features]
                    raise refusal(adapter.name, f"{name} is for a layer of shape {have}, the model's has {want}")
            fused = fuse(given, [size for _, size in parts], in_features)
            fused.down, fused.up = (t.to(self._device, self._dtype) for t in (fused.down, fused.up))
            found[number] = fused
        return LinearAdapters(found, self.step) if found else None

    def check_complete(self) -> None:
        """Once the model is built: every projection of every adapter has found its layer."""
        for adapter in self._folders:
            lost = sorted(adapter.modules.keys() - self._taken)
            if lost:
                text = f"{lost[0]} is not a linear layer of this model that can have an adapter"
                more = f" ({len(lost)} such)" if len(lost) > 1 else ""
                raise refusal(adapter.name, text + more)

    def admit(self, slot: int, admission: Admission) -> None:
        if not admission.adapter:
            return
        number = self._numbers.get(admission.adapter)
        if number is None:
            known = ", ".join(self._numbers)
            raise InvalidArgument(
                f"adapter: {admission.adapter!r} does not exist on this worker; there are {known}", field="adapter"
            )
        self._of_slot[slot] = number
        self._num_live += 1

    def release(self, slot: int) -> None:
        self._num_live -= int(self._of_slot[slot] != NO_ADAPTER)
        self._of_slot[slot] = NO_ADAPTER

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
