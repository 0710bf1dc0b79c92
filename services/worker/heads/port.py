"""What the worker asks of a head.

A head is one thing that a pass through the model can end in beside samples: log-probabilities of the prompt, features
for a drafter, a pooled vector. Which heads a sequence has came with it (SequenceParams); a head keeps by slot what it
was asked for, says before a step which of the step's hidden states it reads, and gets them behind the model.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.services.worker.device.staging import Array
from quire.services.worker.sampling.features.component import SlotState
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32


class HeadResult(Protocol):
    """What a head found in a step, on the host."""

    def merge_into(self, result: StepResult) -> StepResult:
        """Returns the step's result with it."""


class HeadLaunch(Protocol):
    """A head's part of a step under way."""

    @property
    def tensors(self) -> list[Tensor]:
        """What is to be copied to the host."""

    def finish(self, arrays: list[Array]) -> HeadResult:
        """`arrays`: the values of `tensors`. Any thread may ask, once."""


class HeadRows(Protocol):
    """What a step has for a head."""

    @property
    def tokens(self) -> I32 | None:
        """[num_read] indices into the step's tokens, those whose hidden states it reads; None: all, in their order."""

    def launch(self, hidden: Tensor) -> HeadLaunch:
        """`hidden` [num_read, hidden_size] in the model's dtype, valid until the next step is launched."""


class Head(SlotState, Protocol):
    """A slot that does not use it costs nothing."""

    def rows(self, inputs: StepInputs) -> HeadRows | None:
        """Called once for every step, in order; None if the step has nothing for this head."""
