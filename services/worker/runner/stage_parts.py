"""Layers of a step on one pipeline stage, launched eagerly or recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.services.worker.device.staging import Staging
    from quire.services.worker.graphs.recorded_steps import ReadyStep
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.models.causal_lm import CausalLM
    from quire.services.worker.step.step_inputs import StepInputs


class StagePart(Protocol):
    """A stage's part of a step with tokens. Both implementations send the same hidden states."""

    @property
    def num_wanted(self) -> int:
        """Number of hidden states sent back to the first stage."""

    def stage_input(self) -> Tensor:
        """Returns memory [num_tokens, hidden_size] for the previous stage's hidden states; not on the first stage."""

    def compute(self, arrived: Tensor | None) -> Tensor:
        """Runs the stage's layers on the received hidden states (None: on the step's tokens).

        Returns [num_tokens, hidden_size], on the last stage [num_wanted, hidden_size], in memory that nothing else
        writes to.
        """


class EagerStagePart:
    """Launches the stage's layers kernel by kernel on the step's batch."""

    def __init__(self, model: CausalLM, dtype: torch.dtype, batch: ForwardBatch, caches: list[LayerCache]) -> None:
        self._model, self._dtype, self._batch, self._caches = model, dtype, batch, caches

    @property
    def num_wanted(self) -> int:
        wanted = self._batch.token_ids if self._batch.logit_tokens is None else self._batch.logit_tokens
        return int(wanted.size(0))

    def stage_input(self) -> Tensor:
        """Returns new memory [num_tokens, hidden_size] for the previous stage's hidden states."""
        tokens, size = self._batch.token_ids, self._model.config.hidden_size
        return torch.empty((tokens.size(0), size), dtype=self._dtype, device=tokens.device)

    def compute(self, arrived: Tensor | None) -> Tensor:
        """Runs the layers on `arrived` (None: on the embeddings of the step's tokens); may overwrite `arrived`.

        Returns [num_tokens, hidden_size], on the last stage [num_wanted, hidden_size].
        """
        model, batch = self._model, self._batch
        residual = model.embed(batch) if arrived is None else arrived
        return (model.last_layers if model.stage.is_last else model.first_layers)(residual, batch, self._caches)


class RecordedStagePart:
    """Replays the stage's recording, for steps that end in samples alone.

    The last stage of a decode step with rows that do not sample (`step.of_rows`) sends only the sampled rows.
    """

    def __init__(self, step: ReadyStep, inputs: StepInputs, staging: Staging, *, is_last: bool) -> None:
        self._step, self.num_wanted = step, inputs.num_samples
        self._wanted: Tensor | None = None  # rows of the recording that are sent on; None: all
        if is_last and step.of_rows and inputs.num_samples < inputs.num_rows:
            (self._wanted,) = staging.upload([inputs.sampling_tokens])

    def stage_input(self) -> Tensor:
        assert self._step.stage_input is not None, "there is a stage before"
        return self._step.stage_input

    def compute(self, arrived: Tensor | None) -> Tensor:
        """Replays the recording, whose static input memory holds the received hidden states, and returns a copy of its
        result.

        `arrived` is not read.
        """
        rows = self._step.forward()
        return rows.clone() if self._wanted is None else rows.index_select(0, self._wanted)
