"""Steps of a model whose layers are distributed over pipeline stages (layers/stages.py).

The first stage launches its layers and continues with the next step. When the hidden states return from the last stage,
the step's heads are launched and its tokens stored for later steps. Heads are launched in step order, on the launching
thread, at the latest when a step needs their tokens: while one step is on the second stage, the first computes another
one, of other sequences.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from quire.services.worker.device.step_timer import StepTimer
from quire.services.worker.runner.component import Forward
from quire.services.worker.runner.output import Launch, RunnerOutput
from quire.services.worker.runner.stage_parts import EagerStagePart, RecordedStagePart, StagePart
from quire.services.worker.runner.step_ending import EndStep, StageLaunch, StepEnding

if TYPE_CHECKING:
    from typing import Any

    from quire.services.worker.device.staging import Staging
    from quire.services.worker.graphs.recorded_steps import ReadyStep
    from quire.services.worker.heads.heads import StepHeads
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.stages import ReturningStates, Stage
    from quire.services.worker.models.causal_lm import CausalLM
    from quire.services.worker.step.slots import Rows
    from quire.services.worker.step.step_inputs import StepInputs


class PendingStep:
    """Step of the first stage that waits for the hidden states of the last stage.

    Life cycle: await_remote_stages() on a waiting thread, launch_heads() on the launching thread, then wait().
    """

    def __init__(self, inputs: StepInputs, arrival: ReturningStates | None, num_wanted: int, end: EndStep) -> None:
        self.inputs = inputs
        self._arrival, self._num_wanted, self._end = arrival, num_wanted, end
        self._launch: Launch | None = None
        self._error: Exception | None = None

    @property
    def heads_launched(self) -> bool:
        """Whether launch_heads() has run, successfully or not."""
        return self._launch is not None or self._error is not None

    def await_remote_stages(self) -> None:
        """Blocks until launch_heads() would not wait. Called on a dedicated thread."""
        if self._arrival is not None:
            self._arrival.wait()

    def launch_heads(self) -> None:
        """Waits for the hidden states and launches the step's heads on them.

        Stores an error instead of raising it; wait() raises it.
        """
        try:
            hidden = None if self._arrival is None else self._arrival.take()[: self._num_wanted]
            self._launch = self._end(hidden)
        except Exception as error:
            self._error = error

    def wait(self) -> RunnerOutput:
        """Blocks until the results are on the host; the heads must have been launched. Raises the errors of
        launch_heads() and device errors."""
        if self._error is not None:
            raise self._error
        assert self._launch is not None, "the heads are launched"
        return self._launch.wait()


class NonSamplingStep:
    """Step on a later stage, which samples nothing."""

    heads_launched = True

    def __init__(self, timer: StepTimer, marks: list[Any], num_slots: int) -> None:
        self._timer, self._marks, self._num_slots = timer, marks, num_slots

    def await_remote_stages(self) -> None:
        """Returns at once: later stages wait for no other stage."""

    def wait(self) -> RunnerOutput:
        """Returns zeros for the tokens, which only the first stage knows."""
        timings = self._timer.wait(self._marks)
        return RunnerOutput(
            np.zeros(self._num_slots, dtype=np.int32), np.ones(self._num_slots, dtype=np.int32), None, timings
        )


class PipelineStage(Protocol):
    """Launches steps on a rank that has a part of the layers."""

    def launch(self, part: StagePart | None, inputs: StepInputs, end: EndStep, marks: list[Any] | None) -> StageLaunch:
        """Launches the stage's part of a step; `part` is None for steps without tokens."""

    def launch_heads_before(self, inputs: StepInputs) -> None:
        """Launches the heads of the steps whose tokens `inputs` is fed with."""

    def launch_heads_of(self, slots: Rows) -> None:
        """Launches the heads of the steps that name one of `slots`, and of all earlier ones."""

    def launch_oldest_heads(self) -> None:
        """Launches the heads of the oldest pending step."""


class FirstStage:
    """First stage: sends hidden states to the next stage, keeps steps pending until they return, and launches their
    heads in step order.

    Runs on the rank with the scheduler's stream and its tensor-parallel peers.
    """

    def __init__(self, stage: Stage, hidden_size: int, dtype: torch.dtype, num_slots: int) -> None:
        self._link, self._hidden_size, self._dtype = stage.link, hidden_size, dtype
        self._pending: deque[PendingStep] = deque()
        self._num_sampling = np.zeros(num_slots, dtype=np.int32)  # pending steps that sample, by slot
        self._num_naming = np.zeros(num_slots, dtype=np.int32)

    def launch(self, part: StagePart | None, inputs: StepInputs, end: EndStep, marks: list[Any] | None) -> PendingStep:
        """Runs the layers, sends their output to the next stage and registers the receive of the last stage's output.

        Returns a pending step without launching heads; they follow by launch_oldest_heads().
        """
        arrival, num_wanted = None, 0
        if part is not None:
            self._link.send(part.compute(None))
            num_wanted = part.num_wanted
            arrival = self._link.expect(max(num_wanted, 1), self._hidden_size, self._dtype)
        step = PendingStep(inputs, arrival, num_wanted, end)
        self._pending.append(step)
        self._num_sampling[inputs.sampling_slots] += 1
        self._num_naming[inputs.slots] += 1
        return step

    def launch_heads_before(self, inputs: StepInputs) -> None:
        """Launches heads, oldest step first, until no pending step samples a token that `inputs` reads."""
        while self._pending and self._num_sampling[inputs.prev_sampled_slots].any():
            self.launch_oldest_heads()

    def launch_heads_of(self, slots: Rows) -> None:
        """Launches heads, oldest step first, until no pending step names one of `slots`."""
        while self._pending and self._num_naming[slots].any():
            self.launch_oldest_heads()

    def launch_oldest_heads(self) -> None:
        """Removes the oldest pending step and launches its heads; waits for its hidden states."""
        step = self._pending.popleft()
        self._num_sampling[step.inputs.sampling_slots] -= 1
        self._num_naming[step.inputs.slots] -= 1
        step.launch_heads()


class LaterStage:
    """Later stage: receives hidden states from the previous stage and is done with a step once it has sent them on."""

    def __init__(self, stage: Stage, timer: StepTimer) -> None:
        self._stage, self._timer = stage, timer

    def launch(
        self, part: StagePart | None, inputs: StepInputs, end: EndStep, marks: list[Any] | None
    ) -> NonSamplingStep:
        """Receives the previous stage's hidden states, runs the layers and sends the result to the next stage or, from
        the last one, back to the first.

        Never calls `end`: heads run on the first stage.
        """
        if part is not None:
            link, arrived = self._stage.link, part.stage_input()
            link.receive(arrived)
            rows = part.compute(arrived)
            if self._stage.is_last:
                # One row signals completion when no hidden states are read.
                link.send_back(rows if part.num_wanted else arrived[:1].clone())
            else:
                link.send(rows)
        self._timer.mark(marks)
        return NonSamplingStep(self._timer, self._timer.end(marks), len(inputs.sampled_slots))

    def launch_heads_before(self, inputs: StepInputs) -> None:
        """Does nothing: the first stage launches heads."""

    def launch_heads_of(self, slots: Rows) -> None:
        """Does nothing: the first stage launches heads."""

    def launch_oldest_heads(self) -> None:
        """Does nothing: the first stage launches heads."""


class RunnerStage:
    """Pipeline stage of a runner: its layers, and the runner component that launches pending heads."""

    def __init__(
        self, model: CausalLM, dtype: torch.dtype, num_slots: int, *, timer: StepTimer, staging: Staging
    ) -> None:
        self._model, self._dtype, self._staging = model, dtype, staging
        stage, hidden_size = model.stage, model.config.hidden_size
        self._steps: PipelineStage = (
            FirstStage(stage, hidden_size, dtype, num_slots) if stage.is_first else LaterStage(stage, timer)
        )

    def prepare_step(self, inputs: StepInputs) -> None:
        """Launches the heads of pending steps whose sampled tokens `inputs` reads."""
        self._steps.launch_heads_before(inputs)

    def prepare_launch(self, inputs: StepInputs, *, one_token_per_row: bool) -> None:
        """Does nothing: eager and recorded launches send the same hidden states."""

    def launch(
        self,
        model: Forward,
        batch: ForwardBatch,
        caches: list[LayerCache],
        inputs: StepInputs,
        *,
        end: EndStep,
        marks: list[Any] | None,
    ) -> StageLaunch:
        """Runs this stage's layers kernel by kernel; the first stage calls `end` when the last stage's output arrives.

        Ignores `model`: its own model has this stage's layers.
        """
        part = EagerStagePart(self._model, self._dtype, batch, caches) if inputs.num_tokens else None
        return self._steps.launch(part, inputs, end, marks)

    def replay(
        self, step: ReadyStep, inputs: StepInputs, ending: StepEnding, step_heads: StepHeads, marks: list[Any] | None
    ) -> StageLaunch:
        """Replays this stage's recorded layers; the first stage launches the heads when the last stage's output
        arrives."""
        part = RecordedStagePart(step, inputs, self._staging, is_last=self._model.stage.is_last)
        return self._steps.launch(part, inputs, partial(ending.end, inputs, None, step_heads, marks=marks), marks)

    def launch_oldest_heads(self) -> None:
        self._steps.launch_oldest_heads()

    def launch_heads_of(self, slots: Rows) -> None:
        self._steps.launch_heads_of(slots)
