"""Optional parts of a runner, called in order with each step."""

from __future__ import annotations

from typing import Protocol

from quire.services.worker.lora.no_adapters import StepAdapters
from quire.services.worker.step.step_inputs import StepInputs


class RunnerComponent(Protocol):
    """Per-step work of a runner besides layers and heads."""

    def prepare_step(self, inputs: StepInputs) -> None:
        """Runs before anything of the step is launched."""

    def prepare_launch(self, inputs: StepInputs, *, one_token_per_row: bool) -> None:
        """Runs once the launch mode is known.

        `one_token_per_row`: the step replays a recording whose output head reads every row.
        """


class AdapterRows:
    """Writes which rows of a step use which adapter."""

    def __init__(self, adapters: StepAdapters) -> None:
        self._adapters = adapters

    def prepare_step(self, inputs: StepInputs) -> None:
        self._adapters.write_rows(inputs)

    def prepare_launch(self, inputs: StepInputs, *, one_token_per_row: bool) -> None:
        self._adapters.write_logit_rows(inputs, all_rows=one_token_per_row)
