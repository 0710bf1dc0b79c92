"""Drafts of a step and the rows of logits that verify them. On the host, except for the drafts' logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.services.worker.step.drafts.tree_rows import NO_TOKEN, TreeRows
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

if TYPE_CHECKING:  # the simulated worker has no torch
    from torch import Tensor

REJECTED = -2  # row after a rejected draft
NO_DRAFT = -3  # no draft follows


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed tokens of a step: slots ascending, each with at least one token; chains, or trees if `parents` is
    set."""

    slots: Rows
    counts: I32  # [num_slots]
    token_ids: I32  # concatenated by slot
    # float32 [num_tokens, vocab_size] logits they were sampled from; None: deterministic proposals
    proposed: Tensor | None = None
    # [num_tokens] trees: index of each draft's parent within its slot, or ROOT; None: chains
    parents: I32 | None = None

    @classmethod
    def of(cls, proposals: dict[int, I32]) -> Drafts | None:
        """Builds chains of drafts from tokens by slot, leaving out empty ones; None if there are none."""
        nonempty = {slot: tokens for slot, tokens in sorted(proposals.items()) if len(tokens)}
        if not nonempty:
            return None
        counts = np.array([len(tokens) for tokens in nonempty.values()], dtype=np.int32)
        return cls(np.array(list(nonempty)), counts, np.concatenate(list(nonempty.values())).astype(np.int32))


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of logits of a step with drafts: one for each sampling slot's next token, one after each draft."""

    slots: Rows  # [num_slots] sampling slots
    counts: I32  # [num_slots] drafts of each slot
    first_rows: Rows  # [num_slots] first row of each slot
    first_of_row: Rows  # [num_rows] first row of each row's slot
    preceding_drafts: I32  # [num_rows, most] drafts before the row's token, padded with NO_TOKEN
    expected_ids: I32  # [num_rows] the draft that the row verifies; NO_DRAFT for a slot's last row
    proposed: Tensor | None  # as in Drafts
    tree: TreeRows | None = None  # draft trees; `expected_ids` is then unused

    @classmethod
    def of(cls, slots: Rows, counts: I32, drafts: Drafts) -> DraftRows:
        """Builds the rows for the sampling slots, with `counts` drafts each (0 for a slot without) taken in order from
        `drafts`."""
        rows = counts + 1
        row_starts = np.cumsum(rows) - rows
        first_of_row = np.repeat(row_starts, rows)
        num_rows, most = len(first_of_row), int(counts.max())
        if drafts.parents is not None:
            tree = TreeRows.of(counts, drafts.token_ids, drafts.parents)
            next_drafts = np.full(num_rows, NO_DRAFT, dtype=np.int32)
            return cls(slots, counts, row_starts, first_of_row, tree.preceding_drafts, next_drafts, None, tree)
        within = np.arange(num_rows) - first_of_row
        next_drafts = np.full(num_rows, NO_DRAFT, dtype=np.int32)
        next_drafts[within < np.repeat(counts, rows)] = drafts.token_ids
        at = first_of_row[:, None] + np.arange(most)
        draft_tokens = np.where(np.arange(most) < within[:, None], next_drafts[np.minimum(at, num_rows - 1)], NO_TOKEN)
        return cls(slots, counts, row_starts, first_of_row, draft_tokens.astype(np.int32), next_drafts, drafts.proposed)

    def counted(self, token_ids: I32) -> I32:
        """Returns the number of tokens of each slot, [num_slots], accepted drafts and one more, from the rows'
        `token_ids` [num_rows] that include REJECTED."""
        counts: I32 = np.add.reduceat(token_ids != REJECTED, self.first_rows, dtype=np.int32)
        return counts
