"""The rows of logits of a step whose drafts are trees: how they stand to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.shared.columns import I32

NO_TOKEN = -1
ROOT = -1  # in the place of a parent: the last known token

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Each slot's first row stands for its last known token, the others for its drafts, parents before children."""

    token_ids: I32  # [num_rows] the draft of each row; NO_TOKEN for a slot's first
    parents: Rows  # [num_rows] the row that each stands behind; a slot's first has itself
    paths: Rows  # [num_rows, 1 + deepest] each row, the one it stands behind, and so on; then the slot's first row
    depths: I32  # [num_rows] drafts on the way to each

    @classmethod
    def of(cls, counts: I32, token_ids: I32, parents: I32) -> TreeRows:
        """`counts` drafts of each slot; of each draft, slot after slot, the index of its parent among the slot's."""
        firsts = np.cumsum(counts + 1) - counts - 1
        first_of_row = np.repeat(firsts, counts + 1)
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
        """[num_rows, deepest] the drafts on the way to each row, its own last, then NO_TOKEN."""
        places = np.arange(self.paths.shape[1] - 1)
        on_way = np.take_along_axis(self.paths, np.maximum(self.depths[:, None] - 1 - places, 0), axis=1)
        ahead: I32 = np.where(places < self.depths[:, None], self.token_ids[on_way], NO_TOKEN).astype(np.int32)
        return ahead

    def masks(self, first_of_row: Rows) -> npt.NDArray[np.int64]:
        """[num_rows] what each row sees of its tree, and all before (paged_attention.py)."""
        within = np.arange(len(first_of_row)) - first_of_row
        back = within[:, None] - within[self.paths]
        own = np.bitwise_or.reduce(np.int64(1) << back, axis=1)
        masks: npt.NDArray[np.int64] = own | np.int64(-1) << (within + 1)
        return masks


@dataclass(frozen=True, slots=True)
class TokenMoves:
    """Right drafts that stand where others' places were, as rows: each is to take the place of the one beside it."""

    sources: Rows
    targets: Rows

    def of_tokens(self, tokens: I32) -> tuple[I32, I32]:
        """Returns the sources and targets as `tokens` of a step, one for each row."""
        return tokens[self.sources], tokens[self.targets]

    @classmethod
    def of(cls, kept: Rows, firsts: Rows, counts: I32) -> TokenMoves | None:
        """`kept` rows, `counts` of each slot, whose first row it is at; None if all are where they belong."""
        within = np.arange(len(kept)) - np.repeat(np.cumsum(counts) - counts, counts)
        targets = np.repeat(firsts, counts) + within
        moved = kept != targets
        return cls(kept[moved], targets[moved]) if moved.any() else None
