"""Builds the flat arrays of a forward pass from a step. Host side only: numpy."""

from __future__ import annotations

import itertools
from dataclasses import field

import numpy as np
import numpy.typing as npt

from quire.services.worker.step.drafts.drafted_states import StateLags
from quire.services.worker.step.drafts.drafts import DraftRows, Drafts
from quire.services.worker.step.drafts.tree_rows import TreeRows
from quire.services.worker.step.slots import NO_SLOTS, Rows, SlotTable, Step
from quire.shared.columns import I32
from quire.shared.step_value import step_value

NUMBERS = itertools.count(1)  # step numbers, unique in this process


@step_value
class StepInputs:
    """Flat arrays of a step: the tokens of all rows concatenated, rows in slot order."""

    slots: Rows  # [num_rows]
    token_ids: I32  # [num_tokens], 0 where the device fills in its last sampled token
    positions: I32  # [num_tokens] position in the sequence; siblings in a draft tree share one
    slot_mapping: I32  # [num_groups * num_tokens] block * block_size + offset where the token's KV goes, by KV group
    query_start: I32  # [num_rows + 1]
    seq_lens: I32  # [num_rows] positions after the step
    num_blocks: int  # blocks of the longest row
    prev_sampled_tokens: (
        I32  # [num_prev_sampled] indices of tokens that are their slot's last sampled one, which is on the device
    )
    prev_sampled_slots: Rows  # [num_prev_sampled]
    sampling_slots: Rows  # [num_samples], ascending; a slot with drafts has several
    sampling_tokens: I32  # [num_samples] index of the token whose logits each sample uses
    sample_positions: I32  # [num_samples] positions of the sampled tokens
    rows_changed: bool  # slots were released or admitted since the previous step
    drafts: DraftRows | None = None  # draft rows; None: one sample per slot
    number: int = field(default=0, compare=False)  # unique step number in this process; 0: none
    # Number of the step with the same rows, each one position earlier; 0: assembled from the table.
    follows: int = field(default=0, compare=False)
    # For such a step: some rows start a block (workers that draft hold blocks ahead of time), so their KV does not
    # go to the next offset.
    begins_blocks: bool = field(default=False, compare=False)
    # [num_completed] non-sampling slots whose tokens are all computed after this step, ascending
    completed_slots: Rows = field(default_factory=lambda: NO_SLOTS)
    lags: StateLags | None = None  # recurrent states; None: up to date and no token is a draft
    # [num_tokens] tokens that block hashes are made of, where they differ: placeholders that the vocabulary lacks
    hashed_token_ids: I32 | None = None
    # int64 [num_tokens] visible draft-tree nodes (paged_attention.py); None: no draft trees
    tree_mask: npt.NDArray[np.int64] | None = None
    # Of sequences with pictures in models that rotate by row and column (rope_positions.py); None: `positions`
    rope_positions: I32 | None = None  # [num_tokens] positions for rotation
    rope_axes: I32 | None = None  # [3, num_tokens] by time, row and column, if the step computes tokens of pictures
    # [num_tokens] rows of an encoder's output that each token attends to; None: models without cross attention
    num_attended: I32 | None = None

    @property
    def rotated_positions(self) -> I32:
        """Positions by which queries and keys are rotated, [num_tokens]."""
        return self.positions if self.rope_positions is None else self.rope_positions

    @property
    def token_slots(self) -> Rows:
        """Slot of each token, [num_tokens]."""
        if self.num_tokens == self.num_rows:
            return self.slots
        return np.repeat(self.slots, np.diff(self.query_start))

    @property
    def max_query_len(self) -> int:
        """Largest number of tokens of a row."""
        return int(np.diff(self.query_start).max(initial=0)) if self.num_tokens != self.num_rows else 1

    @property
    def sampled_slots(self) -> Rows:
        """Sampling slots without duplicates."""
        return self.sampling_slots if self.drafts is None else self.drafts.slots

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_samples(self) -> int:
        return len(self.sampling_slots)


def assemble(step: Step, table: SlotTable, drafts: Drafts | None = None) -> StepInputs:
    """Assembles the rows of a step, in slot order, into the flat arrays of a forward pass.

    `table` already includes the step; its block table holds all blocks the step writes to. `step.counts` include the
    drafts, whose tokens, the last ones of their rows, are in `drafts`. Costs a few array operations for any number of
    rows, and a loop over rows whose tokens came with their admission.
    """
    query_start = np.zeros(len(step.slots) + 1, dtype=np.int32)
    np.cumsum(step.counts, out=query_start[1:])
    positions, token_slots = _positions(step, query_start)
    slot_mapping = _slot_mapping(step, table, positions, token_slots)
    seq_lens = step.starts + step.counts
    token_ids = np.zeros(len(positions), dtype=np.int32)
    draft_counts = np.zeros_like(step.counts)
    if drafts is not None:
        draft_counts[np.searchsorted(step.slots, drafts.slots)] = drafts.counts
        _fill_drafts(token_ids, drafts, draft_counts, query_start)
    fed_rows = _fill_given(token_ids, step, table, query_start, draft_counts)
    samples = step.samples.nonzero()[0]
    sampling_tokens, sampling_slots = query_start[samples + 1] - 1, step.slots[samples]
    rows, tree_mask = None, None
    if drafts is not None:
        rows = DraftRows.of(sampling_slots, draft_counts[samples], drafts)
        sampling_tokens, sampling_slots = (
            _behind_drafts(sampling_tokens, rows),
            np.repeat(sampling_slots, rows.counts + 1),
        )
        if rows.tree is not None:
            positions, tree_mask = _in_trees(positions, sampling_tokens, rows, rows.tree)
    return StepInputs(
        slots=step.slots,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_start=query_start,
        seq_lens=seq_lens,
        num_blocks=-(-int(seq_lens.max(initial=0)) // table.block_size),
        prev_sampled_tokens=query_start[fed_rows],
        prev_sampled_slots=step.slots[fed_rows],
        sampling_slots=sampling_slots,
        sampling_tokens=sampling_tokens,
        sample_positions=seq_lens[samples] if rows is None else positions[sampling_tokens] + 1,
        rows_changed=bool(len(step.released)) or bool(step.admitted),
        drafts=rows,
        number=next(NUMBERS),
        completed_slots=step.completed,
        lags=step.lags,
        tree_mask=tree_mask,
        num_attended=table.num_attended[token_slots] if table.cross_width else None,
    )


def _positions(step: Step, query_start: I32) -> tuple[I32, Rows]:
    """Returns position, int32 [num_tokens], and slot of every token."""
    if query_start[-1] == len(step.slots):
        return step.starts, step.slots
    rows = np.repeat(np.arange(len(step.slots)), step.counts)
    within = np.arange(query_start[-1], dtype=np.int32) - query_start[rows]
    return step.starts[rows] + within, step.slots[rows]


def _slot_mapping(step: Step, table: SlotTable, positions: I32, token_slots: Rows) -> I32:
    """Returns the KV slot of every token, int32 [num_groups * num_tokens]; tokens whose KV must not be written (cached
    positions, models without KV) point into the null block."""
    if not table.width:
        return np.zeros(len(positions), dtype=np.int32)  # no KV: everything goes to the null block
    blocks, offsets = np.divmod(positions, table.block_size)
    parts = [
        table.block_table[token_slots, group * table.width + blocks] * table.block_size + offsets
        for group in range(table.num_groups)
    ]
    if (step.starts < table.num_cached_tokens[step.slots]).any():
        # A fully cached prompt recomputes its last token, but shared blocks are not written.
        shared = positions < table.num_cached_tokens[token_slots]
        for mapping in parts:
            mapping[shared] = offsets[shared]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _fill_drafts(token_ids: I32, drafts: Drafts, draft_counts: I32, query_start: I32) -> None:
    """Writes draft tokens into `token_ids`, in place: the last `draft_counts` ones of their rows."""
    rows = np.flatnonzero(draft_counts)
    first_drafts = np.repeat(query_start[rows + 1] - drafts.counts, drafts.counts)
    within = np.arange(len(drafts.token_ids)) - np.repeat(np.cumsum(drafts.counts) - drafts.counts, drafts.counts)
    token_ids[first_drafts + within] = drafts.token_ids


def _behind_drafts(last_tokens: I32, rows: DraftRows) -> I32:
    """Returns the indices of each slot's last known token and its drafts, from that of its last token."""
    first = np.repeat(last_tokens - rows.counts, rows.counts + 1)
    tokens: I32 = (first + np.arange(len(first)) - rows.first_of_row).astype(np.int32)
    return tokens


def _in_trees(places: I32, sampling_tokens: I32, rows: DraftRows, tree: TreeRows) -> tuple[I32, npt.NDArray[np.int64]]:
    """Returns tree positions and visibility masks of all tokens, [num_tokens] both. A draft's KV has its own slot, but
    its position is given by its depth in the tree."""
    positions, masks = places.copy(), np.full(len(places), -1, dtype=np.int64)
    positions[sampling_tokens] = places[sampling_tokens[rows.first_of_row]] + tree.depths
    masks[sampling_tokens] = tree.masks(rows.first_of_row)
    return positions, masks


def _fill_given(token_ids: I32, step: Step, table: SlotTable, query_start: I32, draft_counts: I32) -> Rows:
    """Copies tokens that came with admissions into `token_ids`, in place; returns the indices of all other rows, whose
    one known token is filled in on the device."""
    given = step.starts < table.num_admitted_tokens[step.slots]
    for row in given.nonzero()[0].tolist():
        start, count = int(step.starts[row]), int(step.counts[row] - draft_counts[row])
        first = int(query_start[row])
        token_ids[first : first + count] = table.admitted_tokens[step.slots[row]][start : start + count]
    return (~given).nonzero()[0]
