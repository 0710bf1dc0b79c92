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
    """Recurrence of one layer; owns the kept inputs of drafts."""

    def __init__(self) -> None:
        self._kept: Tensors = ()  # [num_places, width] each; allocated with the first drafts

    def run(self, given: Tensors, batch: ForwardBatch, change: Change) -> Tensors:
        """Runs the recurrence over a step.

        `given`: the layer's inputs, [num_tokens, width] each. `change` updates the states of rows with such inputs and
        returns the outputs, [num_tokens, ...] each.
        """
        rows, drafted = batch.attention, batch.drafted_states
        if drafted is None:
            return change(given, (rows.block_tables, None if rows.is_decode else rows.query_start, rows.seq_lens))
        if not self._kept:
            self._kept = tuple(part.new_zeros(drafted.num_places, part.size(1)) for part in given)
        through = tuple(_sure(part, kept, drafted) for part, kept in zip(given, self._kept, strict=True))
        found = change(through, (rows.block_tables, drafted.row_start, drafted.row_lens))
        found = tuple(part.index_select(0, drafted.certain_indices) for part in found)
        return self._read(given, found, rows, drafted, change) if len(drafted.drafts) else found

    def _read(
        self, given: Tensors, found: Tensors, rows: AttentionMetadata, drafted: DraftedStates, change: Change
    ) -> Tensors:
        """Computes the drafts' outputs, with state updates discarded into the null block. `found`: outputs of certain
        tokens."""
        tables = rows.block_tables.new_zeros(len(drafted.rows), 2)
        tables[:, 0] = rows.block_tables[drafted.rows, drafted.blocks]
        guesses = tuple(part.index_select(0, drafted.drafts) for part in given)
        for kept, part in zip(self._kept, guesses, strict=True):
            kept.index_copy_(0, drafted.places, part)
        read = change(guesses, (tables, drafted.draft_start, drafted.draft_lens))
        return tuple(
            part.new_empty(len(given[0]), *part.shape[1:])
            .index_copy_(0, drafted.certain, part)
            .index_copy_(0, drafted.drafts, behind)
            for part, behind in zip(found, read, strict=True)
        )


def _sure(part: Tensor, kept: Tensor, drafted: DraftedStates) -> Tensor:
    """Merges kept and certain inputs: [num_kept + num_certain, width]."""
    rows = part.new_empty(len(drafted.kept_indices) + len(drafted.certain_indices), part.size(1))
    rows.index_copy_(0, drafted.certain_indices, part.index_select(0, drafted.certain))
    return rows.index_copy_(0, drafted.kept_indices, kept.index_select(0, drafted.kept_places))
