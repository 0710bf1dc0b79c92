"""Features for a drafter, of every token of a step: the output head's inputs, and kept states of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quire.services.worker.device.staging import Array
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Features:
    """Features of one step; they stay on the device, so that there is nothing to copy to the host."""

    states: Tensor  # [num_tokens, hidden_width]

    @property
    def tensors(self) -> list[Tensor]:
        return []

    def build_result(self, arrays: list[Array]) -> Features:
        return self

    def merge_into(self, result: StepResult) -> StepResult:
        """Returns `result` unchanged: only the worker's own drafter reads features."""
        return result


class FeaturesHead:
    """Keeps the hidden states of all tokens for the drafter. Sequences do not request it as they request a head:
    `wanted` decides for each step."""

    def __init__(self, wanted: Callable[[StepInputs], bool]) -> None:
        self._wanted = wanted

    def rows(self, inputs: StepInputs) -> FeatureRows | None:
        return ALL_TOKENS if self._wanted(inputs) else None


class FeatureRows:
    """Head input of all tokens of a step, in order."""

    tokens = None

    def launch(self, hidden: Tensor) -> Features:
        """Returns a copy of the hidden states: the drafter reads them after later steps have been launched."""
        return Features(hidden.clone())  # the drafter reads them after later steps have been launched


ALL_TOKENS = FeatureRows()
