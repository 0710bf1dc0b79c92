"""How the tokens of a step go through states where some are drafts: what may yet be refused changes no state.

The tokens of a row that are sure change its state as ever. Drafts behind them read what these have left, and leave
nothing; what a layer was given of them is kept. As many as turned out right go through the state a step later, in front
of the row's next token. Layers do this by themselves (layers/recurrent/recurrence.py); here is which tokens those are.
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
    """How far the states of a step's rows are behind."""

    counts: I32  # [num_rows] positions that are computed and have changed no state yet
    most: int  # of a slot
    block_size: int


@dataclass(frozen=True, slots=True)
class DraftedStates:
    """On the device; int64 where it does not say int32. A slot has `most` places, in which layers keep what they were
    given of its drafts."""

    num_places: int
    # What goes through states: of each row the kept drafts that were right, then its sure tokens.
    row_start: Tensor  # int32 [num_rows + 1]
    row_lens: Tensor  # int32 [num_rows] positions behind these
    certain: Tensor  # [num_sure] tokens of the step that are no drafts
    certain_indices: Tensor  # [num_sure] which of all these they are
    kept_places: Tensor  # [num_kept] places
    kept_indices: Tensor  # [num_kept] which of all these are kept there
    # And what only reads them. A row's states lie as if they were those of a first block, and its drafts in a second.
    drafts: Tensor  # [num_drafts] tokens of the step
    places: Tensor  # [num_drafts] where they are kept
    rows: Tensor  # [num_drafting]
    blocks: Tensor  # [num_drafting] block position that the row's states are in
    draft_start: Tensor  # int32 [num_drafting + 1]
    draft_lens: Tensor  # int32 [num_drafting]


def drafted_states(
    inputs: StepInputs, num_slots: int, upload: Callable[[list[Array]], list[Tensor]]
) -> DraftedStates | None:
    """None where tokens are sure, and states up to date."""
    lags = inputs.lags
    if lags is None:
        return None
    counts, drafted = np.diff(inputs.query_start), np.zeros(inputs.num_rows, dtype=np.int32)
    if inputs.drafts is not None:
        drafted[np.searchsorted(inputs.slots, inputs.drafts.slots)] = inputs.drafts.counts
    first_places = inputs.slots * lags.most
    # Rows of lags.counts kept drafts and counts - drafted tokens.
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
    parts = joined.long().split([len(array) for array in indices])  # where tensors are written to, int32 will not do
    return DraftedStates(num_slots * lags.most, *numbers[:2], *parts, *numbers[2:])


def _side_by_side(counts: Array) -> tuple[Array, Array, Array]:
    """Of rows of so many each: where they begin and end, int32, and of each element its row and its place in that."""
    start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=start[1:])
    rows = np.repeat(np.arange(len(counts)), counts)
    return start, rows, np.arange(start[-1]) - start[rows]
