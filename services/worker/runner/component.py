"""Optional parts of a runner, called in order with each step."""

from __future__ import annotations

from typing import Protocol

from quire.services.worker.lora.no_adapters import StepAdapters
from quire.services.worker.step.step_inputs import StepInputs


class RunnerComponent(Protocol):
    """Optional part of a runner, such as adapters or a pipeline stage, called twice with every step before its kernels
    are launched."""

    def prepare_step(self, inputs: StepInputs) -> None:
        """Runs before anything of the step is launched."""

    def prepare_launch(self, inputs: StepInputs, *, one_token_per_row: bool) -> None:
        """Runs after the runner has chosen between a recording and eager kernels.

        `one_token_per_row`: the step replays a recording whose output head reads every row, not only the sampled
        tokens.
        """


class AdapterRows:
    """Uploads which LoRA adapter each token and each logits row of a step uses."""

    def __init__(self, adapters: StepAdapters) -> None:
        self._adapters = adapters

    def prepare_step(self, inputs: StepInputs) -> None:
        """Uploads the adapter of each token of the step."""
        self._adapters.write_rows(inputs)

    def prepare_launch(self, inputs: StepInputs, *, one_token_per_row: bool) -> None:
        """Uploads the adapter of each logits row: all rows of a recorded decode step, else the sampled tokens."""
        self._adapters.write_logit_rows(inputs, all_rows=one_token_per_row)
