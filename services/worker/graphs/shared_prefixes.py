"""Finds rows of a decode step that share leading blocks. Host side only: numpy.

Blocks have the same id only if they hold the same tokens at the same positions, so comparing leading ids suffices. Rows
are grouped by their first block and share the common prefix of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

LEAST_ROWS = 4
# Positions a group has to save over all its rows: the second kernel costs about as much as reading 20 MB (5 us
# on an H200), 4 KB a position with 8 kv heads of 128 16-bit elements.
LEAST_SAVED = 8192


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a decode step that share their leading blocks, and how many of these."""

    rows: Rows  # ascending
    num_blocks: int

    def saved_blocks(self) -> int:
        """Returns the block reads that sharing saves: all rows but one."""
        return (len(self.rows) - 1) * self.num_blocks


def find_groups(
    block_table: npt.NDArray[np.int32], slots: Rows, seq_lens: I32, block_size: int, *, least_saved: int = LEAST_SAVED
) -> list[Group]:
    """Returns the groups of rows worth sharing, largest saving first: from LEAST_ROWS rows and `least_saved` positions.

    Blocks that are not full are never shared, nor the one with a row's last position, which is not computed yet.
    """
    num_full = (seq_lens - 1) // block_size
    candidates = np.flatnonzero(num_full > 0)
    first_blocks, member_of, sizes = np.unique(
        block_table[slots[candidates], 0], return_inverse=True, return_counts=True
    )
    groups = []
    for index in np.flatnonzero((sizes >= LEAST_ROWS) & (first_blocks > 0)).tolist():
        rows = candidates[member_of == index]
        tables = block_table[slots[rows], : int(num_full[rows].min())]
        alike = (tables == tables[0]).all(axis=0)
        group = Group(rows, len(alike) if alike.all() else int(alike.argmin()))
        if group.saved_blocks() * block_size >= least_saved:
            groups.append(group)
    return sorted(groups, key=Group.saved_blocks, reverse=True)


@dataclass(frozen=True, slots=True)
class PrefixTiles:
    """Groups cut into tiles: attention.port.SharedPrefixes as numpy arrays."""

    members: I32  # [num_tiles, rows_per_tile]
    tables: I32  # [num_tiles]
    lens: I32  # [num_tiles]
    starts: I32  # [num_rows]


def num_tiles(num_rows: int, rows_per_tile: int) -> int:
    """Returns the number of tiles to allocate for `num_rows` rows: one group of all rows plus spare tiles for partly
    filled ones, in multiples of four."""
    return -(-(-(-num_rows // rows_per_tile) + 8) // 4) * 4


def cut(groups: list[Group], num_rows: int, rows_per_tile: int, block_size: int) -> PrefixTiles | None:
    """Cuts groups into tiles for a graph of `num_rows` rows, in order; groups that num_tiles() leaves no room for are
    not shared.

    Returns None if no group is shared.
    """
    most = num_tiles(num_rows, rows_per_tile)
    tiles = PrefixTiles(
        members=np.full((most, rows_per_tile), -1, dtype=np.int32),
        tables=np.zeros(most, dtype=np.int32),
        lens=np.zeros(most, dtype=np.int32),
        starts=np.zeros(num_rows, dtype=np.int32),
    )
    used = 0
    for group in groups:
        wanted = -(-len(group.rows) // rows_per_tile)
        if used + wanted > most:
            continue
        tiles.members[used : used + wanted].reshape(-1)[: len(group.rows)] = group.rows
        tiles.tables[used : used + wanted] = group.rows[0]
        tiles.lens[used : used + wanted] = tiles.starts[group.rows] = group.num_blocks * block_size
        used += wanted
    return tiles if used else None
