"""What runners have that not all of them have: called with each step, in order."""

from __future__ import annotations

from typing import Protocol

from quire.services.worker.lora.no_adapters import StepAdapters
from quire.services.worker.step.step_inputs import StepInputs


class RunnerComponent(Protocol):
    """A part of the work of a step beside its layers and heads."""

    def prepare_step(self, inputs: StepInputs) -> None:
        """Before anything of the step is launched."""

    def prepare_launch(self, inputs: StepInputs, *, one_token_per_row: bool) -> None:
        """The launch mode is known. `one_token_per_row`: by a recording whose output head reads every row."""


class AdapterRows:
    """Which rows of the step go through which adapter."""

    def __init__(self, adapters: StepAdapters) -> None:
        self._adapters = adapters

    def prepare_step(self, inputs: StepInputs) -> None:
        self._adapters.write_rows(inputs)

    def prepare_launch(self, inputs: StepInputs, *, one_token_per_row: bool) -> None:
        self._adapters.write_logit_rows(inputs, all_rows=one_token_per_row)
