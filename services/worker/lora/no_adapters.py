"""Adapters of a worker that serves none, and the interface that steps use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from quire.shared.errors import FailedPrecondition
from quire.shared.models.adapter_ids import AdapterId

if TYPE_CHECKING:  # this module is also imported without torch
    from quire.kernels.reference.low_rank import AdaptedRows
    from quire.services.worker.lora.adapters import LoadedAdapter
    from quire.services.worker.lora.peft.peft_folder import PeftFolder
    from quire.services.worker.step.step_inputs import StepInputs


class StepAdapters(Protocol):
    """Interface of AdapterManager and NoAdapters for steps and orders to load adapters."""

    max_adapters: int

    @property
    def is_active(self) -> bool:
        """Whether a row of the step has an adapter."""

    @property
    def logit_rows(self) -> tuple[AdaptedRows, ...]: ...

    def loaded(self) -> Sequence[LoadedAdapter]: ...

    def add(self, folder: PeftFolder, digest: bytes) -> None: ...

    def remove(self, adapter: AdapterId) -> None: ...

    def write_rows(self, inputs: StepInputs) -> None: ...

    def write_logit_rows(self, inputs: StepInputs, *, all_rows: bool) -> None: ...


class NoAdapters:
    """Adapters of a worker that serves none (null object): all steps have no adapters, and loading one fails."""

    max_adapters = 0
    is_active = False
    logit_rows: tuple[AdaptedRows, ...] = ()

    def loaded(self) -> Sequence[LoadedAdapter]:
        return ()

    def add(self, folder: PeftFolder, digest: bytes) -> None:
        """Raises FailedPrecondition: no adapter can be loaded."""
        raise FailedPrecondition(
            "lora_folders: empty, so this worker cannot load adapters; start it with --lora-folders"
        )

    def remove(self, adapter: AdapterId) -> None:
        """Does nothing: no adapter is loaded."""

    def write_rows(self, inputs: StepInputs) -> None:
        """Does nothing: no row has an adapter."""

    def write_logit_rows(self, inputs: StepInputs, *, all_rows: bool) -> None:
        """Does nothing: no row has an adapter."""


NO_ADAPTERS = NoAdapters()
