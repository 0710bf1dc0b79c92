"""LoRA adapters of a worker: kept on the device, selected per sequence, loaded at start or at run time.

All adapters of a step take one kernel call per layer, which tapes and CUDA graphs record as well. On a GPU, steps
without adapters have recordings of their own and cost nothing extra.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from quire.kernels import Ops
from quire.kernels.reference.low_rank import AdaptedRows
from quire.services.worker.device.staging import Staging, upload
from quire.services.worker.lora.expert_adapters import ExpertAdapters, ExpertShapes
from quire.services.worker.lora.linear_adapters import AdapterCapacity, LayerShape, LinearAdapters
from quire.services.worker.lora.peft.peft_folder import PeftFolder
from quire.services.worker.lora.peft.peft_scales import refusal
from quire.services.worker.lora.step_adapter_rows import NO_ADAPTER, StepAdapterRows, sorted_rows
from quire.services.worker.lora.vocabulary_adapters import EmbeddingAdapters, HeadAdapters, VocabularyAdapters
from quire.services.worker.lora.weight_norms import Product
from quire.shared.errors import InvalidArgument, ResourceExhausted
from quire.shared.models.adapter_ids import AdapterId

if TYPE_CHECKING:
    from quire.services.worker.limits.worker_limits import WorkerLimits
    from quire.services.worker.step.admission import SlotAdmission
    from quire.services.worker.step.slots import Rows
    from quire.services.worker.step.step_inputs import StepInputs

L = TypeVar("L", bound=LinearAdapters)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter on the device, under the number by which layers and kernels know it."""

    id: AdapterId
    path: str
    number: int


class AdapterManager:
    """Owns the worker's LoRA adapters, numbered from 0 with free numbers reused, and the adapter of each slot. Used by
    the device's thread only."""

    def __init__(
        self,
        folders: Sequence[PeftFolder],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        limits: WorkerLimits,
        *,
        staging: Staging,
        capacity: AdapterCapacity,
        whole: Sequence[str] = (),
    ) -> None:
        """`folders`: adapters of the start, by ascending names; `capacity`: of those loaded at run time; 0 adapters:
        none can be loaded. `whole`: suffixes of the layers that those may replace whole."""
        self._ops, self._dtype, self._device = ops, dtype, device
        num_places, ranks = max(capacity.num_adapters, len(folders)), [folder.rank for folder in folders]
        self.max_adapters = num_places if capacity.num_adapters else 0
        self._capacity = AdapterCapacity(num_places, capacity.max_rank if capacity.num_adapters else max(ranks))
        self._initial_folders = list(folders)  # emptied once the model is built
        self._loaded: dict[AdapterId, LoadedAdapter] = {}  # the newest of a name last
        self._layers: list[LinearAdapters | ExpertAdapters] = []
        self._has_logits = False  # whether an adapter may change the output head
        self._taken: set[str] = set()  # projections that layers have registered
        self._whole = tuple(whole)
        self._taken_whole: set[str] = set()  # projections that an adapter may replace whole
        self._adapter_of_slot = np.full(limits.max_num_seqs, NO_ADAPTER, dtype=np.int32)
        self._written = 0  # number of the step whose rows are uploaded
        self._logits_written = (0, False)  # the same for the output head, and whether it reads all rows
        for number, folder in enumerate(folders):
            self._record_loaded(folder, folder.digest(), number)
        most = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.step = StepAdapterRows(most, num_places, device, staging)

    def for_linear(self, shape: LayerShape, product: Product) -> LinearAdapters | None:
        """Creates and registers the adapters of a linear layer; None if it can never have any. `product`: computes the
        layer's own outputs, called once it is loaded. Raises InvalidArgument for adapters of the start that do not
        fit."""
        return self._for_layer(LinearAdapters, shape, self.step.rows, product)

    def for_output_head(self, shape: LayerShape, product: Product) -> HeadAdapters | None:
        """Creates and registers the adapters of the output head, None if it can never have any; its rows are those of a
        step's tokens that have logits."""
        layer = self._for_layer(HeadAdapters, shape, self.step.logit_rows, product)
        self._has_logits = self._has_logits or layer is not None
        return layer

    def for_embedding(self, shape: LayerShape, product: Product) -> EmbeddingAdapters | None:
        """Creates and registers the adapters of an embedding, None if it can never have any. It is treated as a linear
        layer over one-hot vectors; `product` multiplies with its table."""
        return self._for_layer(EmbeddingAdapters, shape, self.step.rows, product)

    def for_experts(self, shapes: ExpertShapes) -> ExpertAdapters | None:
        """Creates and registers the adapters of the experts of a layer; None if they can never have any."""
        self._taken.update(shapes.names)
        if not self.max_adapters and not any(shapes.has(folder) for folder in self._initial_folders):
            return None
        layer = ExpertAdapters(shapes, self._capacity, self.step, self._ops, dtype=self._dtype, device=self._device)
        self._add_layer(layer)
        return layer

    def _for_layer(self, kind: type[L], shape: LayerShape, rows: AdaptedRows, product: Product) -> L | None:
        """Creates the adapters of a layer as an instance of `kind` with the adapters of the start stored in it; None if
        it can never have any. Registers the names of its projections in any case."""
        self._taken.update(part.name for part in shape.parts)
        if issubclass(kind, VocabularyAdapters):
            self._taken_whole.update(part.name for part in shape.parts)
        if not self.max_adapters and not any(shape.adapts(folder) for folder in self._initial_folders):
            return None
        capacity = self._capacity_for(kind, shape)
        layer = kind(shape, capacity, self.step, self._ops, product, rows=rows, dtype=self._dtype, device=self._device)
        self._add_layer(layer)
        return layer

    def _capacity_for(self, kind: type[L], shape: LayerShape) -> AdapterCapacity:
        """Returns the capacity of a layer, of full rank if an adapter may replace it whole."""
        if not issubclass(kind, VocabularyAdapters):
            return self._capacity
        name = shape.parts[0].name
        if not name.endswith(self._whole) and not any(name in folder.saved for folder in self._initial_folders):
            return self._capacity
        return replace(self._capacity, max_rank=max(self._capacity.max_rank, kind.hidden_size(shape)), takes_whole=True)

    def _add_layer(self, layer: LinearAdapters | ExpertAdapters) -> None:
        """Stores the adapters of the start in a new layer and registers it. Raises InvalidArgument for one that does
        not fit."""
        for number, folder in enumerate(self._initial_folders):
            layer.check(folder)
            layer.put(number, folder)
        self._layers.append(layer)

    def check_complete(self) -> None:
        """Checks, once the model is built, that every projection of every adapter of the start has a layer, and every
        suffix of lora_modules_to_save too; drops the adapters' host copies. Raises InvalidArgument."""
        for folder in self._initial_folders:
            self._check_layers(folder)
        for end in self._whole:
            if not any(name.endswith(end) for name in self._taken_whole):
                known = ", ".join(sorted(self._taken_whole))
                text = (
                    f"lora_modules_to_save: {end!r} is not an embedding or output head of this model; available: "
                    f"{known}"
                )
                raise InvalidArgument(text, field="lora_modules_to_save")
        self._initial_folders.clear()

    @property
    def reserved_bytes(self) -> int:
        """Memory to reserve for whole layers of adapters that may be loaded later, including one that is being
        replaced."""
        sizes = [layer.whole_bytes for layer in self._layers if isinstance(layer, VocabularyAdapters)]
        return sum(sizes) * (self.max_adapters - len(self._loaded)) + max(sizes, default=0) if self.max_adapters else 0

    @property
    def is_active(self) -> bool:
        """Whether a row of the step has an adapter."""
        return self.step.is_active

    def loaded(self) -> list[LoadedAdapter]:
        """Returns the loaded adapters by ascending names, the newest of a name last."""
        return sorted(self._loaded.values(), key=lambda adapter: adapter.id.name)

    def add(self, folder: PeftFolder, digest: bytes) -> None:
        """Loads an adapter between two steps, into all layers or none; one that is loaded already becomes the newest of
        its name. Raises InvalidArgument for one that does not fit the model, ResourceExhausted without a free number or
        device memory."""
        known = self._loaded.pop(AdapterId(folder.name, digest), None)
        if known is not None:
            self._loaded[known.id] = known  # becomes the newest again
            return
        self._check_layers(folder)
        for layer in self._layers:
            layer.check(folder)
        used = {adapter.number for adapter in self._loaded.values()}
        number = next((number for number in range(self._capacity.num_adapters) if number not in used), None)
        if number is None:
            text = f"lora: {folder.name}: {self._capacity.num_adapters} adapters are loaded, which is max_loras"
            raise ResourceExhausted(text, field="lora")
        self._put(number, folder)
        self._record_loaded(folder, digest, number)

    def remove(self, adapter: AdapterId) -> None:
        """Unloads an adapter between two steps; does nothing if it is not loaded. Its sequences have ended, but their
        slots may not be released yet: they lose their adapter."""
        removed = self._loaded.pop(adapter, None)
        if removed is None:
            return
        self._forget_rows()
        removed_slots = self._adapter_of_slot == removed.number
        self._adapter_of_slot[removed_slots] = NO_ADAPTER
        for layer in self._layers:
            layer.drop(removed.number)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the adapter of a new sequence's slot; does nothing if it names none. Raises InvalidArgument for one
        that is not loaded."""
        if not admission.adapter:
            return
        adapter = self._find(admission.adapter, admission.adapter_digest)
        if adapter is None:
            known = ", ".join(dict.fromkeys(other.id.name for other in self.loaded())) or "none"
            raise InvalidArgument(
                f"adapter: {admission.adapter!r} does not exist on this worker; available: {known}", field="adapter"
            )
        self._adapter_of_slot[slot] = adapter.number
        self._forget_rows()

    def release(self, slot: int) -> None:
        """Removes the adapter of `slot`, which may have none."""
        self._adapter_of_slot[slot] = NO_ADAPTER
        self._forget_rows()

    def write_rows(self, inputs: StepInputs) -> None:
        """Uploads the adapter of each token of the next step; skipped if the step follows from the last one, which has
        the same rows."""
        if inputs.follows and inputs.follows == self._written:
            self._written = inputs.number
            return
        self._written = inputs.number
        of_tokens = self._adapter_of_slot[inputs.slots]
        if inputs.num_tokens != inputs.num_rows:
            of_tokens = np.repeat(of_tokens, np.diff(inputs.query_start))
        self.step.write(of_tokens)

    def write_logit_rows(self, inputs: StepInputs, *, all_rows: bool) -> None:
        """Uploads the adapter of each row of the output head, after write_rows(); skipped if no adapter changes it or
        the rows are those of the last step. `all_rows`: it reads one token of every row of the step, else its
        samples."""
        if not self._has_logits:
            return
        before, self._logits_written = self._logits_written, (inputs.number, all_rows)
        if not inputs.follows or before != (inputs.follows, all_rows):
            self.step.write_logits(self._adapter_of_slot[inputs.slots if all_rows else inputs.sampling_slots])

    @property
    def logit_rows(self) -> tuple[AdaptedRows, ...]:
        """Rows of the output head in the current or recorded step; empty if no adapter changes it."""
        return (self.step.logit_rows,) if self._has_logits and self.step.is_active else ()

    def logit_rows_of(self, slots: Rows) -> tuple[AdaptedRows, ...]:
        """Returns rows by adapter for an output head call over other rows than the step's, given their slots; uploads
        them anew. Empty if none of them has an adapter, or no adapter changes the output head."""
        numbers = self._adapter_of_slot[slots]
        if not self._has_logits or not (numbers != NO_ADAPTER).any():
            return ()
        starts, order = sorted_rows(numbers, self._capacity.num_adapters)
        return (AdaptedRows(*(upload(part, self._device, np.int32) for part in (starts, order, numbers[order]))),)

    def _forget_rows(self) -> None:
        """Makes the next step upload its rows by adapter again."""
        self._written, self._logits_written = 0, (0, False)

    def _put(self, number: int, folder: PeftFolder) -> None:
        """Copies an adapter into all layers. If device memory runs out, removes it from all again and raises
        ResourceExhausted."""
        try:
            for layer in self._layers:
                layer.put(number, folder)
        except torch.OutOfMemoryError:
            for layer in self._layers:
                layer.drop(number)
            text = f"lora: {folder.name}: the device has no memory for it; lower gpu_memory_utilization"
            raise ResourceExhausted(text, field="lora") from None

    def _record_loaded(self, folder: PeftFolder, digest: bytes, number: int) -> None:
        """Records an adapter as loaded under `number`, with the real path of its folder."""
        adapter = AdapterId(folder.name, digest)
        self._loaded[adapter] = LoadedAdapter(adapter, os.path.realpath(folder.folder), number)

    def _find(self, name: str, digest: bytes) -> LoadedAdapter | None:
        """Returns the adapter with this digest; if `digest` is empty, the newest one of this name."""
        if digest:
            return self._loaded.get(AdapterId(name, digest))
        return next((adapter for adapter in reversed(self.loaded()) if adapter.id.name == name), None)

    def _check_layers(self, folder: PeftFolder) -> None:
        """Raises InvalidArgument if the adapter changes a projection that no layer has registered, or replaces one that
        is no embedding or output head."""
        others = sorted(set(folder.saved) - self._taken_whole)
        if others:
            known = ", ".join(sorted(self._taken_whole)) or "none"
            text = f"modules_to_save: {others[0]} cannot be served whole, embeddings and output heads can: {known}"
            raise refusal(folder.name, text)
        unknown = sorted({*folder.modules, *(stack.name for stack in folder.stacks)} - self._taken)
        if unknown:
            text = f"{unknown[0]} is not a linear layer, embedding or experts of this model that can be adapted"
            more = f" ({len(unknown)} such)" if len(unknown) > 1 else ""
            raise refusal(folder.name, text + more)
