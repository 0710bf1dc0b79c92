"""The adapters of a worker that serves none, and what steps ask of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from quire.shared.errors import FailedPrecondition
from quire.shared.models.adapter_ids import AdapterId

if TYPE_CHECKING:  # this module is also read where there is no torch
    from quire.kernels.reference.low_rank import AdaptedRows
    from quire.services.worker.lora.adapters import LoadedAdapter
    from quire.services.worker.lora.peft.peft_folder import PeftFolder
    from quire.services.worker.step.step_inputs import StepInputs


class StepAdapters(Protocol):
    """See AdapterManager."""

    max_adapters: int

    @property
    def is_active(self) -> bool:
        """Whether some row of the step has an adapter."""

    @property
    def logit_rows(self) -> tuple[AdaptedRows, ...]: ...

    def loaded(self) -> Sequence[LoadedAdapter]: ...

    def add(self, folder: PeftFolder, digest: bytes) -> None: ...

    def remove(self, adapter: AdapterId) -> None: ...

    def write_rows(self, inputs: StepInputs) -> None: ...

    def write_logit_rows(self, inputs: StepInputs, *, all_rows: bool) -> None: ...


class NoAdapters:
    """No step goes through an adapter, and none can be loaded."""

    max_adapters = 0
    is_active = False
    logit_rows: tuple[AdaptedRows, ...] = ()

    def loaded(self) -> Sequence[LoadedAdapter]:
        return ()

    def add(self, folder: PeftFolder, digest: bytes) -> None:
        """Raises FailedPrecondition."""
        raise FailedPrecondition("lora_folders: this worker was started with none: it loads no adapters")

    def remove(self, adapter: AdapterId) -> None:
        """None is held."""

    def write_rows(self, inputs: StepInputs) -> None:
        """No row has one."""

    def write_logit_rows(self, inputs: StepInputs, *, all_rows: bool) -> None:
        """No row has one."""


NO_ADAPTERS = NoAdapters()
