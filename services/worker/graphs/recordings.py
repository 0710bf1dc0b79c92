"""All recordings that a runner has, and which of them takes a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.services.worker.graphs.recorded_steps import ReadyStep, StepGraphs
from quire.services.worker.step.slots import NewBlocks
from quire.services.worker.step.step_inputs import StepInputs

if TYPE_CHECKING:
    from quire.services.worker.graphs.stage_graphs import SampleGraphs


class NoGraphs:
    """Of a kind of step that is not recorded."""

    one_token_per_row, keeps_hidden = False, False
    most_tokens = count = 0

    def accepts(self, inputs: StepInputs, new_blocks: NewBlocks) -> bool:
        return False

    def prepare(self, inputs: StepInputs, new_blocks: NewBlocks) -> ReadyStep:
        raise AssertionError("it takes no step")

    def forget_rows(self) -> None:
        """Nothing is kept of rows."""


NO_GRAPHS = NoGraphs()


class Recordings:
    """Filled once the memory that they are recorded over is there."""

    def __init__(self) -> None:
        self.decodes: StepGraphs = NO_GRAPHS
        self.chunks: StepGraphs = NO_GRAPHS
        self.samples: SampleGraphs | None = None  # of what steps of a first stage end in
        self._kinds: list[StepGraphs] = []  # those that are there, in the order in which they are asked

    def use_decodes(self, graphs: StepGraphs) -> None:
        self.decodes = graphs
        self._kinds.insert(0, graphs)

    def use_chunks(self, graphs: StepGraphs) -> None:
        self.chunks = graphs
        self._kinds.append(graphs)

    def find(self, inputs: StepInputs, new_blocks: NewBlocks, *, samples_alone: bool) -> StepGraphs | None:
        """Returns those that have room for the step and can end in its heads; None if there are none. What drafts do to
        states has as many rows as it happens to have, and is recorded nowhere."""
        if inputs.rows_changed:
            self.decodes.forget_rows()
        if inputs.lags is not None:
            return None
        for graphs in self._kinds:
            if (samples_alone or graphs.keeps_hidden) and graphs.accepts(inputs, new_blocks):
                return graphs
        return None

    def forget_rows(self) -> None:
        """Slots have been released, admitted or given other blocks."""
        self.decodes.forget_rows()
