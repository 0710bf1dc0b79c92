"""Common parts of recorded steps: inputs in one array, a forward pass, sampling."""

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
    """Hidden states of every token of a step, kept for heads other than sampling."""

    forward: Callable[[ForwardBatch], Tensor]  # -> [num_tokens, hidden_size]
    head: Callable[[Tensor], Tensor]  # selected hidden states -> [num_logits, vocab_size]
    memory: Tensor  # [most_tokens, hidden_size] written by steps


@dataclass(frozen=True, slots=True)
class RecordedStage:
    """A pipeline stage's part of the layers (runner/pipeline.py)."""

    input_rows: (
        Tensor | None
    )  # [most_tokens, hidden_size] where the stage before leaves its rows; None: this is the first
    outputs_all_tokens: bool  # sends rows of all tokens to the next stage, else only of sampled tokens


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """Components of a recorded step: forward pass, sampling, input and output kernels."""

    forward: Callable[[ForwardBatch], Tensor]  # logits [num_logits, vocab_size], or a stage's output
    choice: PlainChoice | None  # None: the recording does not sample
    edges: StepEdges
    max_seq_len: int
    rows_per_prefix_tile: int  # 0: shared prefixes are not used
    hidden: KeptHidden | None = None  # None: steps end in sampling alone
    adapters: StepAdapterRows | None = None  # None: no adapters
    stage: RecordedStage | None = None  # None: this rank has all layers
    has_trees: bool = False  # steps with chunks have tree masks
    cross_length: int = 0  # most rows of an encoder's output that a row attends to; 0: no cross attention

    @property
    def is_adapted(self) -> bool:
        """Whether the next step has adapters: it then uses recordings of its own."""
        return self.adapters is not None and self.adapters.is_active

    def stage_input(self, num_tokens: int, recorded: int) -> Tensor | None:
        """Returns where a step of `num_tokens` reads the previous stage's rows, or None without a previous stage.

        `recorded`: tokens of the recording. The padding after the rows is zeroed, whatever earlier steps left there.
        """
        if self.stage is None or self.stage.input_rows is None:
            return None
        if num_tokens < recorded:
            self.stage.input_rows[num_tokens:recorded].zero_()
        return self.stage.input_rows[:num_tokens]


@dataclass(slots=True)
class RecordedStep:
    """Forward pass and sampling of a step as two recordings; sampling may also run eagerly."""

    columns: Tensor  # int32 [num_columns, stride]
    forward: Recording
    choose: Recording | None  # None: the recording does not sample

    @classmethod
    def of(
        cls, recorder: Recorder, columns: Tensor, forward: Recordable, choose: Callable[[Tensor], Tensor] | None
    ) -> RecordedStep:
        """Records `forward` and, if it is not None, `choose` on its result, with `columns` as their static inputs."""
        first, *others = recorder.record(forward, *(() if choose is None else (choose,)))
        return cls(columns, first, others[0] if others else None)


@step_value
class ReadyStep:
    """Step whose inputs are uploaded, to be replayed: forward(), then choose() if needed, before the next step is
    prepared."""

    _step: RecordedStep
    _choice: PlainChoice | None
    _num_rows: int  # rows returned by forward()
    of_rows: bool  # logits are per row of the step, else per sample
    hidden: Tensor | None = None  # [num_tokens, hidden_size] after forward(), until the next step's; None: not kept
    stage_input: Tensor | None = (
        None  # [num_tokens, hidden_size] to be filled before forward(); None: of no other stage
    )

    def forward(self) -> Tensor:
        """Replays the forward pass; returns [num_logits, vocab_size], or a stage's output, valid until the next
        step."""
        self._step.forward.replay()
        return self._step.forward.result[: self._num_rows]

    def choose(self, choice: BoundChoice) -> Tensor:
        """Replays the recorded sampling with the parameters in `choice`; returns the token ids [num_rows].

        Stores them as the slots' last tokens. Only for recordings that sample.
        """
        assert self._choice is not None, "it ends in logits"
        assert self._step.choose is not None, "it ends in logits"
        self._choice.load(choice, self._num_rows)
        self._step.choose.replay()
        return self._step.choose.result[: self._num_rows]


class StepGraphs(Protocol):
    """Recordings of one kind of step (decodes, or steps with chunks), made on demand for selected sizes."""

    one_token_per_row: bool  # steps have one token per row

    @property
    def keeps_hidden(self) -> bool:
        """Whether steps can end in heads that read hidden states, besides sampling."""

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a step with chunks that is replayed."""

    @property
    def count(self) -> int:
        """Number of recordings made so far."""

    def forget_rows(self) -> None:
        """Discards cached facts about rows, after slots were released or admitted."""

    def accepts(self, inputs: StepInputs, new_blocks: NewBlocks) -> bool:
        """Returns whether one of the recordings has room for this step; recordings not made yet count."""

    def prepare(self, inputs: StepInputs, new_blocks: NewBlocks) -> ReadyStep:
        """Uploads the inputs of a step that accepts() allows into the static memory of its recording; records it if it
        is missing."""
