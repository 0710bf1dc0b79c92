"""Uploads a step's arrays and builds the batch of a forward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.attention.port import AttentionMetadata
from quire.services.worker.device.device import Device
from quire.services.worker.device.staging import Staging, upload
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.lora.no_adapters import StepAdapters
from quire.services.worker.step.drafts.drafted_states import drafted_states
from quire.services.worker.step.slot_memory import SlotMemory
from quire.services.worker.step.slots import NewBlocks
from quire.services.worker.step.step_inputs import StepInputs
from quire.services.worker.step.text_marks import TextMarks
from quire.shared.columns import I32
from quire.shared.step_value import step_value


@step_value
class Uploaded:
    """Inputs of a step on the device, all int32."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    slots: Tensor
    prev_sampled_tokens: Tensor
    prev_sampled_slots: Tensor
    sampling_slots: Tensor
    sampling_tokens: Tensor
    sampling_rows: Tensor
    sample_positions: Tensor
    block_places: Tensor  # indices of the new blocks in the flat block tables
    block_ids: Tensor


class StepBatches:
    """Builds batches of steps that no CUDA graph runs, including those of the CPU's tape."""

    def __init__(
        self,
        device: Device,
        staging: Staging,
        caches: list[LayerCache],
        memory: SlotMemory,
        *,
        adapters: StepAdapters,
        marks: TextMarks | None,
    ) -> None:
        self.caches, self.staging = caches, staging
        self._memory, self._adapters, self._marks = memory, adapters, marks
        self._copies_tables = not device.is_synchronous  # else the device reads the host's block tables
        self._group_tables, self._width = memory.group_tables, memory.table_width
        self._num_slots = len(memory.last_tokens)  # including the scratch slot; len() of a tensor takes 2 us

    def upload(self, inputs: StepInputs, new_blocks: NewBlocks) -> Uploaded:
        """Copies the step's arrays and the new blocks' ids and places to the device, as int32, in one staged upload."""
        places = new_blocks.slots * self._width + new_blocks.columns
        return Uploaded(
            *self.staging.upload(
                [
                    inputs.token_ids,
                    inputs.rotated_positions,
                    inputs.slot_mapping,
                    inputs.query_start,
                    inputs.seq_lens,
                    inputs.slots,
                    inputs.prev_sampled_tokens,
                    inputs.prev_sampled_slots,
                    inputs.sampling_slots,
                    inputs.sampling_tokens,
                    np.searchsorted(inputs.query_start, inputs.sampling_tokens, side="right") - 1,
                    inputs.sample_positions,
                    places,
                    new_blocks.ids,
                ]
            )
        )

    def batch(self, inputs: StepInputs, up: Uploaded, wanted: Tensor | None, *, only_last: bool) -> ForwardBatch:
        """Builds the batch of a forward pass and writes the new blocks to the device's block tables.

        `wanted`: int32 [num_wanted] tokens whose hidden states are read; None: all. `only_last`: they are
        up.sampling_tokens, and the last layer may skip all others.
        """
        first, *others = tables = self._tables_of(inputs, up)
        mapping, *mappings = up.slot_mapping.view(len(tables), inputs.num_tokens) if others else (up.slot_mapping,)
        cross = None if inputs.num_attended is None else self._cross(inputs, inputs.num_attended)
        batch = ForwardBatch(
            token_ids=self._feed(inputs, up),
            positions=up.positions,
            slot_mapping=mapping,
            attention=AttentionMetadata(
                first,
                up.query_start,
                up.seq_lens,
                max_query_len=inputs.max_query_len,
                max_seq_len=int(inputs.seq_lens.max(initial=0)),
                tree_mask=None if inputs.tree_mask is None else upload(inputs.tree_mask, up.positions.device),
                cross=cross,
            ),
            logit_tokens=wanted,
            last=self._last(inputs, up, tables) if only_last else None,
            drafted_states=None
            if inputs.lags is None
            else drafted_states(inputs, self._num_slots, self.staging.upload),
            axes=None if inputs.rope_axes is None else upload(inputs.rope_axes, up.positions.device),
        )
        if self._marks is not None:
            device = up.positions.device
            types, seen = self._marks.types(inputs, device), self._marks.num_seen(inputs, device)
            batch = replace(batch, token_types=types, num_seen=seen)
        return batch.with_groups(others, mappings) if others else batch

    def _last(self, inputs: StepInputs, up: Uploaded, tables: list[Tensor]) -> AttentionMetadata | None:
        """Returns attention metadata for a last layer that completes only the sampled tokens, each as a decode row.

        Returns None if nothing is cached or would be saved, and for steps with drafts or adapters. `tables`: block
        tables by KV group.
        """
        if not self.caches or inputs.drafts is not None or inputs.num_tokens == inputs.num_rows:
            return None
        if self._adapters.is_active or inputs.num_attended is not None:
            return None
        of_last_layer = tables[self.caches[-1].group]
        return AttentionMetadata(
            of_last_layer.index_select(0, up.sampling_rows),
            torch.arange(inputs.num_samples + 1, dtype=torch.int32, device=of_last_layer.device),
            up.sample_positions,
            max_query_len=1,
            max_seq_len=int(inputs.seq_lens.max(initial=0)),
        )

    def _cross(self, inputs: StepInputs, num_attended: I32) -> AttentionMetadata:
        """Returns attention metadata of all tokens, each as a row that sees all of its encoder's output."""
        slots, starts, lens = self.staging.upload(
            [inputs.token_slots, np.arange(inputs.num_tokens + 1, dtype=np.int32), num_attended]
        )
        return AttentionMetadata(
            self._memory.cross_tables.index_select(0, slots),
            starts,
            lens,
            max_query_len=1,
            max_seq_len=int(num_attended.max(initial=0)),
        )

    def _feed(self, inputs: StepInputs, up: Uploaded) -> Tensor:
        """Returns the step's token ids int32 [num_tokens] with tokens sampled by earlier steps filled in from device
        memory.

        Writes into `up.token_ids`; slots without a sampled token (-1) get 0.
        """
        if not len(inputs.prev_sampled_tokens):
            return up.token_ids
        fed = self._memory.last_tokens.index_select(0, up.prev_sampled_slots).clamp_(min=0)
        if len(inputs.prev_sampled_tokens) == inputs.num_tokens:
            return fed
        up.token_ids.index_copy_(0, up.prev_sampled_tokens.long(), fed)
        return up.token_ids

    def _tables_of(self, inputs: StepInputs, up: Uploaded) -> list[Tensor]:
        """Writes the new blocks to the device's tables and returns the rows' block tables by KV group, int32 [num_rows,
        num_blocks].

        num_blocks is what the longest sequence of the step needs.
        """
        if len(up.block_ids) and self._copies_tables:
            self._memory.block_tables.view(-1).index_copy_(0, up.block_places.long(), up.block_ids)
        return [tables[:, : inputs.num_blocks].index_select(0, up.slots) for tables in self._group_tables]
