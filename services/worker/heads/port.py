"""Interface between the worker and a head.

A head is an output of a forward pass besides samples: prompt log-probabilities, features for a drafter, a pooled
vector. A sequence requests heads with its SequenceParams; a head stores the request by slot, tells before a step which
hidden states it reads, and receives them after the model's layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from quire.services.worker.device.staging import Array
from quire.services.worker.sampling.features.component import ParameterState
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32


class HeadResult(Protocol):
    """Output of a head for a step, on the host."""

    def merge_into(self, result: StepResult) -> StepResult:
        """Returns the step's result with this output added."""


class HeadLaunch(Protocol):
    """Output of a head for a step in flight."""

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors to copy to the host."""

    def build_result(self, arrays: list[Array]) -> HeadResult:
        """Builds the result from `arrays`, the values of `tensors`. Called once, from any thread."""


class HeadRows(Protocol):
    """Input of a head in a step: which hidden states it reads, and how it is launched on them."""

    @property
    def tokens(self) -> I32 | None:
        """Indices of the step's tokens whose hidden states the head reads, [num_read]; None: all tokens in order."""

    def launch(self, hidden: Tensor) -> HeadLaunch:
        """Launches the head on `hidden` [num_read, hidden_size] in the model's dtype, valid until the next step is
        launched."""


class Head(ParameterState, Protocol):
    """Output of a forward pass in addition to samples, requested by sequences on admission. Slots that do not use it
    cost nothing."""

    @property
    def specs(self) -> Mapping[int, object]:
        """Requests of the sequences, by slot."""

    def rows(self, inputs: StepInputs) -> HeadRows | None:
        """Returns the head's input in a step, None if it has none; called once for each step that begins with requests,
        in order."""
