"""Recordings of pipeline stages: a stage's layers, and the first stage's sampling from returned hidden states.

Rows are sent between recordings (ranks/link.py): a recording of layers reads memory into which the previous stage's
rows were received, and its result is copied before it is sent, because the next replay overwrites it. Only the step's
own rows are sent, without padding, so each stage may replay a recording or launch kernels independently.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import Array, Staging, aligned
from quire.services.worker.graphs.cuda_graph import Recorder
from quire.services.worker.graphs.decode_graphs import fitting
from quire.services.worker.graphs.recorded_steps import ReadyStep, RecordedStage, RecordedStep
from quire.services.worker.graphs.step_edges import StepEdges
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.single_row import SingleRowProgram
from quire.services.worker.sampling.choice import PlainChoice
from quire.services.worker.step.slot_memory import SlotMemory
from quire.services.worker.step.step_inputs import StepInputs


class StageLayers:
    """Forward pass of one pipeline stage's layers, as it is recorded."""

    def __init__(
        self,
        model: CausalLM,
        caches: list[LayerCache],
        single_row: SingleRowProgram | None,
        *,
        most_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates the memory for the previous stage's rows, except on the first stage.

        `most_tokens`: tokens of the largest recording. `single_row`: fused kernels for steps of one token; None: those
        are computed like all others.
        """
        self._model, self._caches, self._single_row = model, caches, single_row
        arrived = None
        if not model.stage.is_first:
            arrived = torch.zeros((most_tokens, model.config.hidden_size), dtype=dtype, device=device)
        self.recorded = RecordedStage(arrived, outputs_all_tokens=not model.stage.is_last)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Runs the stage's layers on the received rows, on the first stage on the embeddings.

        Returns [num_tokens, hidden_size], on the last stage the normed hidden states [num_samples, hidden_size].
        """
        model, caches = self._model, self._caches
        arrived, num_tokens = self.recorded.input_rows, batch.token_ids.size(0)
        residual = model.embed(batch) if arrived is None else arrived[:num_tokens]
        if self._single_row is not None and num_tokens == 1:
            residual = self._single_row.layers(residual, batch, caches)
            return model.norm(residual) if model.stage.is_last else residual
        return (model.last_layers if model.stage.is_last else model.first_layers)(residual, batch, caches)


class SampleGraphs:
    """Recordings of output head and sampling on hidden states returned by the last stage."""

    def __init__(
        self,
        head: Callable[[Tensor], Tensor],
        choice: PlainChoice,
        memory: SlotMemory,
        sizes: list[int],
        *,
        hidden: Tensor,
        edges: StepEdges,
        recorder: Recorder,
        staging: Staging,
    ) -> None:
        """Takes `head` (hidden states to logits), ascending numbers of rows `sizes`, and `hidden` [sizes[-1],
        hidden_size], memory for the returned rows."""
        self._head, self._choice, self._memory, self._sizes = head, choice, memory, sizes
        self._hidden, self._edges, self._recorder, self._staging = hidden, edges, recorder, staging
        self._steps: dict[int, RecordedStep] = {}
        self._flat = torch.zeros(2 * aligned(sizes[-1]), dtype=torch.int32, device=hidden.device)

    def capture(self, most: int = 0) -> None:
        """Records the `most` largest sizes (0: all), largest first, so that smaller ones reuse their memory.

        Runs once without recording before: the recorder's own first run covered layers, and this code is loaded at its
        first call.
        """
        slots, positions = self._columns(self._sizes[-1])[:, : self._sizes[-1]]
        self._choose(self._head(self._hidden), slots, positions)
        for size in self._sizes[: -most - 1 : -1] if most else reversed(self._sizes):
            self._step(size)

    @property
    def count(self) -> int:
        return len(self._steps)

    def prepare(self, inputs: StepInputs, hidden: Tensor) -> ReadyStep:
        """Copies `hidden` [num_samples, hidden_size], at least one row, in the order of the step's samples, and uploads
        their slots and positions.

        Until the returned step has been launched, no other may be prepared. Records a missing size.
        """
        step = self._step(fitting(self._sizes, inputs.num_samples))
        self._fill(step.columns, inputs.sampling_slots, inputs.sample_positions)
        self._hidden[: inputs.num_samples].copy_(hidden)
        return ReadyStep(step, self._choice, inputs.num_samples, of_rows=False)

    def _fill(self, columns: Tensor, slots: Array, positions: Array) -> None:
        self._staging.upload_into(columns, [slots, positions], [self._memory.scratch_slot, 0])

    def _columns(self, size: int) -> Tensor:
        """Returns the static columns of `size` samples (slots, positions), int32 [2, stride], filled with padding."""
        columns = self._flat[: 2 * aligned(size)].view(2, aligned(size))
        self._fill(columns, *[np.zeros(0, np.int32)] * 2)
        return columns

    def _step(self, size: int) -> RecordedStep:
        """Returns the recording of `size` rows; records output head and sampling if it is missing."""
        if size not in self._steps:
            columns = self._columns(size)
            slots, positions = columns[:, :size]
            self._steps[size] = RecordedStep.of(
                self._recorder,
                columns,
                lambda: self._head(self._hidden[:size]),
                lambda logits: self._choose(logits, slots, positions),
            )
        return self._steps[size]

    def _choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Samples a token for each row of `logits` and stores it as the slot's last token."""
        token_ids = self._choice.choose(logits, positions)
        self._edges.end_step(slots, self._memory, token_ids)
        return token_ids
