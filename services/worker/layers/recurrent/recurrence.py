"""Applies tokens to recurrent states when some of them are drafts (step/drafts/drafted_states.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionMetadata
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.step.drafts.drafted_states import DraftedStates

Tensors = tuple["Tensor", ...]
# Block tables, row starts (None: one token per row), sequence lengths.
Rows = tuple["Tensor", "Tensor | None", "Tensor"]
Change = Callable[[Tensors, Rows], Tensors]


class Recurrence:
    """Recurrence of one layer; keeps the inputs of drafts until it is known which are accepted."""

    def __init__(self) -> None:
        self._kept: Tensors = ()  # [num_places, width] each; allocated with the first drafts

    def run(self, inputs: Tensors, batch: ForwardBatch, change: Change) -> Tensors:
        """Applies accepted drafts of earlier steps and certain tokens to the states; drafts of this step read the
        states but leave them unchanged.

        `inputs`: the layer's inputs, [num_tokens, width] each. `change` updates the states of rows with such inputs and
        returns the outputs, [num_tokens, ...] each. Returns the outputs of all tokens in order.
        """
        rows, drafted = batch.attention, batch.drafted_states
        if drafted is None:
            return change(inputs, (rows.block_tables, None if rows.is_decode else rows.query_start, rows.seq_lens))
        if not self._kept:
            self._kept = tuple(part.new_zeros(drafted.num_places, part.size(1)) for part in inputs)
        certain_inputs = tuple(_sure(part, kept, drafted) for part, kept in zip(inputs, self._kept, strict=True))
        outputs = change(certain_inputs, (rows.block_tables, drafted.row_start, drafted.row_lens))
        outputs = tuple(part.index_select(0, drafted.certain_indices) for part in outputs)
        return self._read(inputs, outputs, rows, drafted, change) if len(drafted.drafts) else outputs

    def _read(
        self, inputs: Tensors, outputs: Tensors, rows: AttentionMetadata, drafted: DraftedStates, change: Change
    ) -> Tensors:
        """Keeps the drafts' inputs, computes their outputs and merges them with `outputs`, those of the certain tokens.

        The states after drafts are stored in the null block, so they are lost.
        """
        tables = rows.block_tables.new_zeros(len(drafted.rows), 2)
        tables[:, 0] = rows.block_tables[drafted.rows, drafted.blocks]
        draft_inputs = tuple(part.index_select(0, drafted.drafts) for part in inputs)
        for kept, part in zip(self._kept, draft_inputs, strict=True):
            kept.index_copy_(0, drafted.places, part)
        draft_outputs = change(draft_inputs, (tables, drafted.draft_start, drafted.draft_lens))
        return tuple(
            part.new_empty(len(inputs[0]), *part.shape[1:])
            .index_copy_(0, drafted.certain, part)
            .index_copy_(0, drafted.drafts, draft_part)
            for part, draft_part in zip(outputs, draft_outputs, strict=True)
        )


def _sure(part: Tensor, kept: Tensor, drafted: DraftedStates) -> Tensor:
    """Merges accepted drafts' kept inputs and certain tokens' inputs in sequence order: [num_kept + num_certain,
    width]."""
    rows = part.new_empty(len(drafted.kept_indices) + len(drafted.certain_indices), part.size(1))
    rows.index_copy_(0, drafted.certain_indices, part.index_select(0, drafted.certain))
    return rows.index_copy_(0, drafted.kept_indices, kept.index_select(0, drafted.kept_places))
