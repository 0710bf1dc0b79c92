"""Input and output kernels of a recorded step: token ids in, sampled tokens stored, block tables updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from quire.services.worker.step.slot_memory import SlotMemory


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """Inputs of a decode step. All int32 [num_rows], on the device."""

    slots: Tensor
    given: Tensor  # token ids; LAST_SAMPLED: the slot's last sampled token
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor  # including this token
    order: Tensor  # rows, longest first
    places: Tensor  # indices of block_ids in the flat block tables
    block_ids: Tensor


LAST_SAMPLED = -1


class StepInputColumns(Protocol):
    """Columns read by StepEdges.begin_step: int32, of equal length, on the device (DecodeColumns, ChunkColumns)."""

    @property
    def slots(self) -> Tensor: ...

    @property
    def given(self) -> Tensor: ...

    @property
    def places(self) -> Tensor: ...

    @property
    def block_ids(self) -> Tensor: ...


class StepEdges(Protocol):
    """Work before and after the model in a recorded step; one kernel each on CUDA, six in plain torch."""

    def begin_step(self, columns: StepInputColumns, memory: SlotMemory) -> Tensor:
        """Writes the new block ids to the flat block tables; returns token ids, the slot's last sampled token where
        `given` is LAST_SAMPLED.

        Slots without a sampled token get 0.
        """

    def end_step(self, slots: Tensor, memory: SlotMemory, token_ids: Tensor) -> None:
        """Stores `token_ids` as the last tokens of `slots`."""


class TorchStepEdges:
    """Implementation in plain torch, for tests and devices without Triton."""

    def begin_step(self, columns: StepInputColumns, memory: SlotMemory) -> Tensor:
        """Writes the new block ids to the flat block tables and returns the token ids, int32 [num_rows]."""
        memory.block_tables.view(-1).index_copy_(0, columns.places.long(), columns.block_ids)
        last = memory.last_tokens.index_select(0, columns.slots).clamp(min=0)
        return columns.given.where(columns.given >= 0, last)

    def end_step(self, slots: Tensor, memory: SlotMemory, token_ids: Tensor) -> None:
        memory.last_tokens.index_copy_(0, slots.long(), token_ids)


class TritonStepEdges:
    """Implementation with one Triton kernel each for begin_step() and end_step()."""

    def __init__(self) -> None:
        from quire.kernels.triton import step_edges

        self._kernels: Any = step_edges

    def begin_step(self, columns: StepInputColumns, memory: SlotMemory) -> Tensor:
        """Writes the new block ids and computes the token ids in one kernel."""
        token_ids: Tensor = self._kernels.begin_step(
            columns.slots, columns.given, columns.places, columns.block_ids, memory.last_tokens, memory.block_tables
        )
        return token_ids

    def end_step(self, slots: Tensor, memory: SlotMemory, token_ids: Tensor) -> None:
        self._kernels.end_step(slots, token_ids, memory.last_tokens)
