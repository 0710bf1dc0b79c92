"""Selects which tokens of a step change recurrent states when some tokens are drafts.

Certain tokens of a row change its state as usual. Drafts read that state but leave it unchanged; a layer keeps its
inputs for them, and replays the accepted ones in the next step, before the row's next token. The layers do the
computation (layers/recurrent/recurrence.py); this module selects the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.shared.columns import I32

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.step.step_inputs import StepInputs

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StateLags:
    """How many positions the recurrent states of a step's rows lag behind the computed tokens: accepted drafts, whose
    inputs layers have kept."""

    counts: I32  # [num_rows] computed positions not yet applied to the state
    most: int  # maximum lag of a slot
    block_size: int


@dataclass(frozen=True, slots=True)
class DraftedStates:
    """Index tensors on the device, int64 unless noted.

    A slot has `most` places, in which layers keep their inputs for its drafts.
    """

    num_places: int
    # Tokens that change states: per row the kept inputs of accepted drafts, then its certain tokens.
    row_start: Tensor  # int32 [num_rows + 1]
    row_lens: Tensor  # int32 [num_rows] sequence length after these
    certain: Tensor  # [num_certain] tokens of the step that are not drafts
    certain_indices: Tensor  # [num_certain] their indices among the tokens that change states
    kept_places: Tensor  # [num_kept] places to read kept inputs from
    kept_indices: Tensor  # [num_kept] their indices among the tokens that change states
    # Tokens that only read states. A row's state is addressed as a first block, its drafts as a second one.
    drafts: Tensor  # [num_drafts] tokens of the step
    places: Tensor  # [num_drafts] places to keep their inputs in
    rows: Tensor  # [num_drafting]
    blocks: Tensor  # [num_drafting] block position of the row's state
    draft_start: Tensor  # int32 [num_drafting + 1]
    draft_lens: Tensor  # int32 [num_drafting]


def drafted_states(
    inputs: StepInputs, num_slots: int, upload: Callable[[list[Array]], list[Tensor]]
) -> DraftedStates | None:
    """Returns the indices for a step, uploaded in one call; None if no token is a draft and all states are up to
    date."""
    lags = inputs.lags
    if lags is None:
        return None
    counts, drafted = np.diff(inputs.query_start), np.zeros(inputs.num_rows, dtype=np.int32)
    if inputs.drafts is not None:
        drafted[np.searchsorted(inputs.slots, inputs.drafts.slots)] = inputs.drafts.counts
    first_places = inputs.slots * lags.most
    # Rows of lags.counts kept drafts and (counts - drafted) tokens.
    row_start, rows, within = _side_by_side(lags.counts + counts - drafted)
    is_kept = within < lags.counts[rows]
    kept_indices, certain_indices = np.flatnonzero(is_kept), np.flatnonzero(~is_kept)
    kept = first_places[rows[kept_indices]] + within[kept_indices]
    sure = (inputs.query_start[:-1] - lags.counts)[rows[certain_indices]] + within[certain_indices]
    drafting = np.flatnonzero(drafted)
    draft_start, of_drafting, behind = _side_by_side(drafted[drafting])
    drafts = (inputs.query_start[1:] - drafted)[drafting[of_drafting]] + behind
    row_lens = inputs.seq_lens - drafted
    places, blocks = first_places[drafting[of_drafting]] + behind, (row_lens[drafting] - 1) // lags.block_size
    indices = [sure, certain_indices, kept, kept_indices, drafts, places, drafting, blocks]
    rows_of = [row_start, row_lens, draft_start, lags.block_size + drafted[drafting]]
    *numbers, joined = upload([*rows_of, np.concatenate(indices)])
    parts = joined.long().split([len(array) for array in indices])  # index_copy_ requires int64
    return DraftedStates(num_slots * lags.most, *numbers[:2], *parts, *numbers[2:])


def _side_by_side(counts: Array) -> tuple[Array, Array, Array]:
    """Returns row starts (int32), and the row and the offset within it of each element, for rows of `counts`."""
    start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=start[1:])
    rows = np.repeat(np.arange(len(counts)), counts)
    return start, rows, np.arange(start[-1]) - start[rows]
