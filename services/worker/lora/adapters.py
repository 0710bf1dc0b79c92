"""The adapters that a worker serves: kept on the device, chosen by sequences, there from the start or loaded later.

All adapters of a step are one call for each layer, which tapes and graphs record as well. On a GPU there are recordings
of steps without adapters besides, so that those cost what they cost without the option.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels import Ops
from services.worker.device.staging import Staging
from services.worker.lora.linear_adapters import AdapterRoom, LayerShape, LinearAdapters
from services.worker.lora.peft_folder import PeftFolder
from services.worker.lora.peft_scales import refusal
from services.worker.lora.step_rows import NO_ADAPTER, StepRows
from services.worker.lora.weight_norms import Product
from shared.adapter_contents import AdapterId
from shared.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from services.worker.limits import Limits
    from services.worker.step.admission import Admission
    from services.worker.step.step_inputs import StepInputs


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
        staging: Staging,
        room: AdapterRoom,
    ) -> None:
        """`folders`: those that are there from the start, by ascending names; `room`: for others, which come while the
        worker runs; of no adapters: none do."""
        self._ops, self._dtype, self._device = ops, dtype, device
        capacity, ranks = max(room.num_adapters, len(folders)), [folder.rank for folder in folders]
        self.max_adapters = capacity if room.num_adapters else 0
        self._room = AdapterRoom(capacity, room.most_rank if room.num_adapters else max(ranks))
        self._first = list(folders)  # until the model is built
        self._held: dict[AdapterId, Held] = {}  # of one name the newest last
        self._layers: list[LinearAdapters] = []
        self._taken: set[str] = set()  # projections that layers have asked for
        self._of_slot = np.full(limits.max_num_seqs, NO_ADAPTER, dtype=np.int32)
        self._written = 0  # number of the step whose rows are in place
        for number, folder in enumerate(folders):
            self._hold(folder, folder.digest(), number)
        most = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.step = StepRows(most, capacity, device, staging)

    def of_linear(self, shape: LayerShape, product: Product) -> LinearAdapters | None:
        """What they add to such a layer, whose outputs `product` gives once it is loaded; None: nothing, ever. Raises
        InvalidArgument for shapes that do not fit."""
        self._taken.update(part.name for part in shape.parts)
        if not self.max_adapters and not any(any(shape.pairs_of(folder.modules)) for folder in self._first):
            return None
        layer = LinearAdapters(shape, self._room, self.step, self._ops, product, dtype=self._dtype, device=self._device)
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
        number = next((number for number in range(self._room.num_adapters) if number not in numbers), None)
        if number is None:
            text = f"lora: {folder.name}: there are {self._room.num_adapters} adapters, which is max_loras"
            raise ResourceExhausted(text, field="lora")
        self._put(number, folder)
        self._hold(folder, digest, number)

    def remove(self, adapter: AdapterId) -> None:
        """Between two steps. Sequences that went through it have ended; slots of theirs may still be live."""
        held = self._held.pop(adapter, None)
        if held is None:
            return
        self._written = 0
        ended = self._of_slot == held.number
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
        self._written = 0

    def release(self, slot: int) -> None:
        self._of_slot[slot] = NO_ADAPTER
        self._written = 0

    def write_rows(self, inputs: StepInputs) -> None:
        """Of the next step. One that follows from the last has the same."""
        if inputs.follows and inputs.follows == self._written:
            self._written = inputs.number
            return
        self._written = inputs.number
        of_tokens = self._of_slot[inputs.slots]
        if inputs.num_tokens != inputs.num_rows:
            of_tokens = np.repeat(of_tokens, np.diff(inputs.query_start))
        self.step.write(of_tokens)

    def _put(self, number: int, folder: PeftFolder) -> None:
        """Into all layers, or into none."""
        try:
            for layer in self._layers:
                layer.put(number, folder.modules)
        except torch.OutOfMemoryError:
            for layer in self._layers:
                layer.drop(number)
            text = f"lora: {folder.name}: the device has no memory for it; a lower gpu_memory_utilization leaves some"
            raise ResourceExhausted(text, field="lora") from None

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
