"""How a step goes through the layers of a model: what a runner asks, and the answer where all of them are here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quire.services.worker.runner.step_ending import StageLaunch, StepEnding

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.graphs.recorded_steps import ReadyStep
    from quire.services.worker.heads.heads import StepHeads
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.runner.step_ending import End
    from quire.services.worker.step.slots import Rows
    from quire.services.worker.step.step_inputs import StepInputs


class Forward(Protocol):
    """A model's layers."""

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor: ...


class StepLayers(Protocol):
    """Launches the layers that are here, and what the step ends in if its hidden states are."""

    def launch(
        self,
        model: Forward,
        batch: ForwardBatch,
        caches: list[LayerCache],
        inputs: StepInputs,
        *,
        end: End,
        marks: list[Any] | None,
    ) -> StageLaunch:
        """Kernel by kernel, or as a tape."""

    def replay(
        self, step: ReadyStep, inputs: StepInputs, ending: StepEnding, others: StepHeads, marks: list[Any] | None
    ) -> StageLaunch:
        """As it has been recorded."""

    def settle_next(self) -> None:
        """Settles the oldest step that waits for layers elsewhere."""

    def settle_of(self, slots: Rows) -> None:
        """Settles those that name one of `slots`, and all before them."""


class WholeLayers:
    """All layers are here: no step waits for others."""

    def launch(
        self,
        model: Forward,
        batch: ForwardBatch,
        caches: list[LayerCache],
        inputs: StepInputs,
        *,
        end: End,
        marks: list[Any] | None,
    ) -> StageLaunch:
        return end(model.forward(batch, caches) if inputs.num_tokens else None)

    def replay(
        self, step: ReadyStep, inputs: StepInputs, ending: StepEnding, others: StepHeads, marks: list[Any] | None
    ) -> StageLaunch:
        return ending.end_recorded(step, inputs, others, marks)

    def settle_next(self) -> None:
        """No step waits."""

    def settle_of(self, slots: Rows) -> None:
        """No step waits."""
