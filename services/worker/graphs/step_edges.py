"""What a recorded step does around the model, on the device: tokens in, tokens kept, block tables brought up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from quire.services.worker.step.slot_memory import SlotMemory


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """Inputs of a step of one token a row. All int32 [num_rows], on the device."""

    slots: Tensor
    given: Tensor  # token ids; LAST_SAMPLED: the slot's last one
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor  # this token included
    order: Tensor  # rows, longest first
    places: Tensor  # in the flat block tables, where block_ids go
    block_ids: Tensor


LAST_SAMPLED = -1


class StepInputColumns(Protocol):
    """Columns that say what a step begins with: int32, all of one length, on the device."""

    @property
    def slots(self) -> Tensor: ...

    @property
    def given(self) -> Tensor: ...

    @property
    def places(self) -> Tensor: ...

    @property
    def block_ids(self) -> Tensor: ...


class StepEdges(Protocol):
    """The work before and behind the model in a recorded step: on CUDA one kernel each, where torch would take six."""

    def begin_step(self, columns: StepInputColumns, memory: SlotMemory) -> Tensor:
        """Writes the new block ids to the tables; returns token ids, 0 for slots that have none to feed."""

    def end_step(self, slots: Tensor, memory: SlotMemory, token_ids: Tensor) -> None:
        """Keeps `token_ids` as the last of `slots`."""


class TorchStepEdges:
    """In plain torch, for tests and for devices without Triton."""

    def begin_step(self, columns: StepInputColumns, memory: SlotMemory) -> Tensor:
        memory.block_tables.view(-1).index_copy_(0, columns.places.long(), columns.block_ids)
        last = memory.last_tokens.index_select(0, columns.slots).clamp(min=0)
        return columns.given.where(columns.given >= 0, last)

    def end_step(self, slots: Tensor, memory: SlotMemory, token_ids: Tensor) -> None:
        memory.last_tokens.index_copy_(0, slots.long(), token_ids)


class TritonStepEdges:
    """One kernel each."""

    def __init__(self) -> None:
        from quire.kernels.triton import step_edges

        self._kernels: Any = step_edges

    def begin_step(self, columns: StepInputColumns, memory: SlotMemory) -> Tensor:
        token_ids: Tensor = self._kernels.begin_step(
            columns.slots, columns.given, columns.places, columns.block_ids, memory.last_tokens, memory.block_tables
        )
        return token_ids

    def end_step(self, slots: Tensor, memory: SlotMemory, token_ids: Tensor) -> None:
        self._kernels.end_step(slots, token_ids, memory.last_tokens)
