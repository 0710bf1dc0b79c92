"""What CUDA graphs of steps have in common: inputs in one array, a forward pass, a choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.services.worker.graphs.cuda_graph import Recordable, Recorder, Recording
from quire.services.worker.graphs.step_edges import StepEdges
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.lora.step_adapter_rows import StepAdapterRows
from quire.services.worker.sampling.choice import BoundChoice, PlainChoice
from quire.services.worker.step.slots import NewBlocks
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.step_value import step_value


@dataclass(frozen=True, slots=True)
class KeptHidden:
    """Hidden states of every token of a step, kept for other heads than sampling."""

    forward: Callable[[ForwardBatch], Tensor]  # [num_tokens, hidden_size] of a step
    head: Callable[[Tensor], Tensor]  # [num_logits, vocab_size] of some of them
    memory: Tensor  # [most_tokens, hidden_size] where steps leave them


@dataclass(frozen=True, slots=True)
class RecordedStage:
    """A part of the layers: the rest of a step is elsewhere (runner/pipeline.py)."""

    input_rows: (
        Tensor | None
    )  # [most_tokens, hidden_size] where the stage before leaves its rows; None: this is the first
    outputs_all_tokens: bool  # a row of each token, to the next stage; else of those that are sampled behind


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """What is recorded."""

    forward: Callable[[ForwardBatch], Tensor]  # logits [num_logits, vocab_size] of a step, or what a stage hands on
    choice: PlainChoice | None  # None: nothing is sampled behind it
    edges: StepEdges
    max_seq_len: int
    rows_per_prefix_tile: int  # 0: nothing is shared
    hidden: KeptHidden | None = None  # None: steps can end in sampling alone
    adapters: StepAdapterRows | None = None  # None: no step has any
    stage: RecordedStage | None = None  # None: all layers are here
    has_trees: bool = False  # steps with chunks come with what each token sees of a tree

    @property
    def is_adapted(self) -> bool:
        """Whether the step that comes has adapters: those without have recordings of their own."""
        return self.adapters is not None and self.adapters.is_active

    def stage_input(self, num_tokens: int, recorded: int) -> Tensor | None:
        """Where a step of `num_tokens`, of a recording of `recorded`, reads the rows of the stage before; None where
        there is none. The padding behind them is zeros, whatever steps before have left there."""
        if self.stage is None or self.stage.input_rows is None:
            return None
        if num_tokens < recorded:
            self.stage.input_rows[num_tokens:recorded].zero_()
        return self.stage.input_rows[:num_tokens]


@dataclass(slots=True)
class RecordedStep:
    """The two parts of a step: the choice may also be made in another way."""

    columns: Tensor  # int32 [num_columns, stride]
    forward: Recording
    choose: Recording | None  # None: nothing is sampled behind it

    @classmethod
    def of(
        cls, recorder: Recorder, columns: Tensor, forward: Recordable, choose: Callable[[Tensor], Tensor] | None
    ) -> RecordedStep:
        first, *others = recorder.record(forward, *(() if choose is None else (choose,)))
        return cls(columns, first, others[0] if others else None)


@step_value
class ReadyStep:
    """A step whose inputs are in place: forward, then choose if that is wanted, before the next step is prepared."""

    _step: RecordedStep
    _choice: PlainChoice | None
    _num_rows: int  # that forward() gives
    of_rows: bool  # logits are those of the step's rows; else of its samples
    hidden: Tensor | None = None  # [num_tokens, hidden_size] after forward(), until the next step's; None: not kept
    stage_input: Tensor | None = (
        None  # [num_tokens, hidden_size] to be filled before forward(); None: of no other stage
    )

    def forward(self) -> Tensor:
        """[num_logits, vocab_size], or what a stage hands on; until the next step's."""
        self._step.forward.replay()
        return self._step.forward.result[: self._num_rows]

    def choose(self, choice: BoundChoice) -> Tensor:
        """Token ids for those logits as they are; kept as their slots' last."""
        assert self._choice is not None, "it ends in logits"
        assert self._step.choose is not None, "it ends in logits"
        self._choice.load(choice, self._num_rows)
        self._step.choose.replay()
        return self._step.choose.result[: self._num_rows]


class StepGraphs(Protocol):
    """Recordings of one kind of step."""

    one_token_per_row: bool  # steps are of one token a row

    @property
    def keeps_hidden(self) -> bool:
        """Whether steps can end in other heads than sampling, which read hidden states."""

    @property
    def most_tokens(self) -> int:
        """Of a step with chunks that goes through a recording."""

    @property
    def count(self) -> int:
        """Recordings that there are."""

    def forget_rows(self) -> None:
        """Slots have been released or admitted."""

    def accepts(self, inputs: StepInputs, new_blocks: NewBlocks) -> bool:
        """Whether one of the recordings has room for this step."""

    def prepare(self, inputs: StepInputs, new_blocks: NewBlocks) -> ReadyStep:
        """Inputs to the device, of a step that accepts() allows."""
