"""All recordings of a runner and the selection among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.services.worker.graphs.recorded_steps import ReadyStep, StepGraphs
from quire.services.worker.step.slots import NewBlocks
from quire.services.worker.step.step_inputs import StepInputs

if TYPE_CHECKING:
    from quire.services.worker.graphs.stage_graphs import SampleGraphs


class NoGraphs:
    """Null object for a kind of step that is not recorded: accepts no step."""

    one_token_per_row, keeps_hidden = False, False
    most_tokens = count = 0

    def accepts(self, inputs: StepInputs, new_blocks: NewBlocks) -> bool:
        return False

    def prepare(self, inputs: StepInputs, new_blocks: NewBlocks) -> ReadyStep:
        raise AssertionError("it takes no step")

    def forget_rows(self) -> None:
        """Does nothing: no state of rows is kept."""


NO_GRAPHS = NoGraphs()


class Recordings:
    """Recordings of a runner, added once the memory they are recorded over exists."""

    def __init__(self) -> None:
        self.decodes: StepGraphs = NO_GRAPHS
        self.chunks: StepGraphs = NO_GRAPHS
        self.samples: SampleGraphs | None = None  # sampling of a first pipeline stage
        self.kinds: list[StepGraphs] = []  # in the order in which they are tried

    def use_decodes(self, graphs: StepGraphs) -> None:
        """Sets the recordings of decode steps, which are tried before others."""
        self.decodes = graphs
        self.kinds.insert(0, graphs)

    def use_chunks(self, graphs: StepGraphs) -> None:
        """Sets the recordings of steps with chunks, which are tried after those of decodes."""
        self.chunks = graphs
        self.kinds.append(graphs)

    def find(self, inputs: StepInputs, new_blocks: NewBlocks, *, samples_alone: bool) -> StepGraphs | None:
        """Returns the recordings that have room for the step and can end in its heads, or None to launch kernels.

        `samples_alone`: no head besides sampling runs. Steps with drafts of recurrent models are not recorded: their
        state updates have varying numbers of rows. Discards cached facts about rows if `inputs.rows_changed`.
        """
        if inputs.rows_changed:
            self.decodes.forget_rows()
        if inputs.lags is not None:
            return None
        for graphs in self.kinds:
            if (samples_alone or graphs.keeps_hidden) and graphs.accepts(inputs, new_blocks):
                return graphs
        return None

    def forget_rows(self) -> None:
        """Discards cached facts about rows, after slots were released, admitted or given other blocks."""
        self.decodes.forget_rows()
