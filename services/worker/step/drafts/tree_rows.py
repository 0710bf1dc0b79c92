"""Structure of the rows of logits in a step with draft trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.shared.columns import I32

NO_TOKEN = -1
ROOT = -1  # parent of drafts that follow the last known token

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Tree structure of rows: a slot's first row is its last known token, others its drafts, parents first."""

    token_ids: I32  # [num_rows] the draft of each row; NO_TOKEN for a slot's first row
    parents: Rows  # [num_rows] parent row; a slot's first row is its own parent
    paths: Rows  # [num_rows, 1 + deepest] each row and its ancestors, padded with the slot's first row
    depths: I32  # [num_rows] drafts on the path to each row

    @classmethod
    def of(cls, counts: I32, token_ids: I32, parents: I32) -> TreeRows:
        """Builds the rows for `counts` drafts per slot, given each draft's parent index within its slot."""
        first_rows = np.cumsum(counts + 1) - counts - 1
        first_of_row = np.repeat(first_rows, counts + 1)
        rows = np.arange(len(first_of_row))
        drafted = rows != first_of_row
        tokens, above = np.full(len(rows), NO_TOKEN, dtype=np.int32), rows.copy()
        tokens[drafted] = token_ids
        above[drafted] = np.where(parents == ROOT, first_of_row[drafted], first_of_row[drafted] + 1 + parents)
        paths = [rows]
        while (paths[-1] != first_of_row).any():
            paths.append(above[paths[-1]])
        path = np.stack(paths, axis=1)
        depths = (path != first_of_row[:, None]).sum(axis=1, dtype=np.int32)
        return cls(tokens, above, path, depths)

    @property
    def preceding_drafts(self) -> I32:
        """Returns the drafts on the path to each row, itself last, padded with NO_TOKEN: [num_rows, deepest]."""
        places = np.arange(self.paths.shape[1] - 1)
        on_way = np.take_along_axis(self.paths, np.maximum(self.depths[:, None] - 1 - places, 0), axis=1)
        draft_tokens: I32 = np.where(places < self.depths[:, None], self.token_ids[on_way], NO_TOKEN).astype(np.int32)
        return draft_tokens

    def masks(self, first_of_row: Rows) -> npt.NDArray[np.int64]:
        """Returns the visibility bits of each row, [num_rows]: bit k is the token k rows earlier in its slot; set for
        its ancestors, itself, and everything before the slot's first row (paged_attention.py)."""
        within = np.arange(len(first_of_row)) - first_of_row
        back = within[:, None] - within[self.paths]
        own = np.bitwise_or.reduce(np.int64(1) << back, axis=1)
        masks: npt.NDArray[np.int64] = own | np.int64(-1) << (within + 1)
        return masks


@dataclass(frozen=True, slots=True)
class TokenMoves:
    """Rows of accepted tree drafts whose KV has to move: each source row takes the place of its target row."""

    sources: Rows
    targets: Rows

    def of_tokens(self, tokens: I32) -> tuple[I32, I32]:
        """Returns sources and targets as token indices of the step, given the token of each row."""
        return tokens[self.sources], tokens[self.targets]

    @classmethod
    def of(cls, kept: Rows, first_rows: Rows, counts: I32) -> TokenMoves | None:
        """Builds the moves that make the accepted rows `kept`, `counts` per slot, adjacent from each slot's first row
        on; None if all are in place."""
        within = np.arange(len(kept)) - np.repeat(np.cumsum(counts) - counts, counts)
        targets = np.repeat(first_rows, counts) + within
        moved = kept != targets
        return cls(kept[moved], targets[moved]) if moved.any() else None
