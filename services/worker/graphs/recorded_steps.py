"""What CUDA graphs of steps have in common: inputs in one array, a forward pass, a choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.graphs.cuda_graph import Recording
from services.worker.graphs.step_edges import StepEdges
from services.worker.lora.step_rows import StepRows
from services.worker.sampling.choice import BoundChoice, PlainChoice
from services.worker.step.forward_batch import ForwardBatch
from services.worker.step.slots import NewBlocks
from services.worker.step.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class KeptHidden:
    """Hidden states of every token of a step, kept for other heads than sampling."""

    forward: Callable[[ForwardBatch], Tensor]  # [num_tokens, hidden_size] of a step
    head: Callable[[Tensor], Tensor]  # [num_logits, vocab_size] of some of them
    memory: Tensor  # [most_tokens, hidden_size] where steps leave them


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """What is recorded."""

    logits: Callable[[ForwardBatch], Tensor]  # [num_logits, vocab_size] of a step
    choice: PlainChoice
    edges: StepEdges
    longest_seq: int
    rows_per_prefix_tile: int  # 0: nothing is shared
    hidden: KeptHidden | None = None  # None: steps can end in sampling alone
    adapters: StepRows | None = None  # None: no step has any

    @property
    def is_adapted(self) -> bool:
        """Whether the step that comes has adapters: those without have recordings of their own."""
        return self.adapters is not None and self.adapters.is_active


@dataclass(slots=True)
class RecordedStep:
    """The two parts of a step: the choice may also be made in another way."""

    columns: Tensor  # int32 [num_columns, stride]
    forward: Recording
    choose: Recording


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A step whose inputs are in place: forward, then choose if that is wanted, before the next step is prepared."""

    _step: RecordedStep
    _choice: PlainChoice
    _num_logits: int
    of_rows: bool  # logits are those of the step's rows; else of its samples
    hidden: Tensor | None = None  # [num_tokens, hidden_size] after forward(), until the next step's; None: not kept

    def forward(self) -> Tensor:
        """[num_logits, vocab_size], until the next step's."""
        self._step.forward.replay()
        return self._step.forward.result[: self._num_logits]

    def choose(self, choice: BoundChoice) -> Tensor:
        """Token ids for those logits as they are; kept as their slots' last."""
        self._choice.load(choice, self._num_logits)
        self._step.choose.replay()
        return self._step.choose.result[: self._num_logits]


class StepGraphs(Protocol):
    """Recordings of one kind of step."""

    def takes(self, inputs: StepInputs, new_blocks: NewBlocks) -> bool:
        """Whether one of the recordings has room for this step."""

    def prepare(self, inputs: StepInputs, new_blocks: NewBlocks) -> ReadyStep:
        """Inputs to the device, of a step that takes() allows."""
