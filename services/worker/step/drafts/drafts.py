"""Drafts of a step, and the rows of logits that they lead to. On the host, but for what they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.services.worker.step.drafts.tree_rows import NO_TOKEN, TreeRows
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

if TYPE_CHECKING:  # the simulated worker has no torch
    from torch import Tensor

REJECTED = -2  # a row behind a draft that turned out wrong
NO_DRAFT = -3  # in the place of a draft where none follows


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was proposed: slots ascending, each with at least one token."""

    slots: Rows
    counts: I32  # [num_slots]
    token_ids: I32  # slot after slot
    # float32 [num_tokens, vocab_size] logits that they were drawn from; None: they were certain
    proposed: Tensor | None = None
    # [num_tokens] of trees: which of its slot's drafts each follows, ROOT: none; None: each follows the one before
    parents: I32 | None = None

    @classmethod
    def of(cls, proposals: dict[int, I32]) -> Drafts | None:
        """From tokens by slot; None if there are none."""
        some = {slot: tokens for slot, tokens in sorted(proposals.items()) if len(tokens)}
        if not some:
            return None
        counts = np.array([len(tokens) for tokens in some.values()], dtype=np.int32)
        return cls(np.array(list(some)), counts, np.concatenate(list(some.values())).astype(np.int32))


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of logits of a step with drafts: one for each sampling slot's next token, one behind each draft."""

    slots: Rows  # [num_slots] sampling slots
    counts: I32  # [num_slots] drafts of each
    first_rows: Rows  # [num_slots] row of its next token
    first_of_row: Rows  # [num_rows] the same for each row
    preceding_drafts: I32  # [num_rows, most] drafts between the slot's last token and the row's, then NO_TOKEN
    expected_ids: I32  # [num_rows] the draft that the row is to confirm; NO_DRAFT for a slot's last row
    proposed: Tensor | None  # as in Drafts
    tree: TreeRows | None = None  # where rows do not simply follow each other; `following` then says nothing

    @classmethod
    def of(cls, slots: Rows, counts: I32, drafts: Drafts) -> DraftRows:
        """`slots` sample, with `counts` of drafts each, which are those of `drafts`."""
        rows = counts + 1
        firsts = np.cumsum(rows) - rows
        first_of_row = np.repeat(firsts, rows)
        num_rows, most = len(first_of_row), int(counts.max())
        if drafts.parents is not None:
            tree = TreeRows.of(counts, drafts.token_ids, drafts.parents)
            following = np.full(num_rows, NO_DRAFT, dtype=np.int32)
            return cls(slots, counts, firsts, first_of_row, tree.preceding_drafts, following, None, tree)
        within = np.arange(num_rows) - first_of_row
        following = np.full(num_rows, NO_DRAFT, dtype=np.int32)
        following[within < np.repeat(counts, rows)] = drafts.token_ids
        at = first_of_row[:, None] + np.arange(most)
        ahead = np.where(np.arange(most) < within[:, None], following[np.minimum(at, num_rows - 1)], NO_TOKEN)
        return cls(slots, counts, firsts, first_of_row, ahead.astype(np.int32), following, drafts.proposed)

    def counted(self, token_ids: I32) -> I32:
        """[num_slots] tokens of each slot, from those of the rows, REJECTED among them."""
        counts: I32 = np.add.reduceat(token_ids != REJECTED, self.first_rows, dtype=np.int32)
        return counts
