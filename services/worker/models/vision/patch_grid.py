"""Order, positions and windows of the patches of a picture whose neighbouring patches are merged into one row.

Patches come in merge order: squares of merge x merge patches from left to right and from top to bottom, the patches of
a square likewise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]


class PatchGrid(NamedTuple):
    """Numbers of patches of one item."""

    frames: int  # groups of frames: a patch covers several
    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        return self.frames * self.rows * self.columns


def positions(grid: PatchGrid, merge: int) -> Indices:
    """Returns row and column of each patch of the grid in merge order, [num_patches, 2]."""
    rows, columns = np.divmod(np.arange(grid.rows * grid.columns), grid.columns)
    of_frame = np.stack([in_merge_order(axis.reshape(grid.rows, grid.columns), merge) for axis in (rows, columns)], 1)
    return np.tile(of_frame, (grid.frames, 1))


def in_merge_order(values: Indices, merge: int) -> Indices:
    """Flattens an array [rows, columns] of one frame into merge order."""
    rows, columns = values.shape
    return values.reshape(rows // merge, merge, columns // merge, merge).transpose(0, 2, 1, 3).ravel()


def windows(grid: PatchGrid, merge: int, side: int) -> tuple[Indices, list[int]]:
    """Divides the merged squares of each frame into windows of side x side, smaller at the right and lower borders.

    Returns the squares' indices window after window, [num_patches / merge**2], and each window's number of squares.
    """
    rows, columns = grid.rows // merge, grid.columns // merge
    squares = np.arange(grid.frames * rows * columns).reshape(grid.frames, rows, columns)
    parts = [
        frame[top : top + side, left : left + side].ravel()
        for frame in squares
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    return np.concatenate(parts), [len(part) for part in parts]


def interpolation(grid: PatchGrid, merge: int, side: int) -> tuple[Indices, Weights]:
    """Computes the bilinear sampling of a table of side x side learned positions, whose corners lie at the picture's
    ones. Returns for each patch in merge order four indices into the flat table and their weights, [num_patches, 4]
    each."""
    place = positions(grid, merge).astype(np.float32)
    lengths = np.array((grid.rows, grid.columns), dtype=np.float32)
    at = place * np.float32(side - 1) / np.maximum(lengths - 1, 1)
    low = np.floor(at)
    share, low = at - low, low.astype(np.int64)
    high = np.minimum(low + 1, side - 1)
    rows, columns = (np.stack((low[:, axis], high[:, axis]), 1) for axis in (0, 1))
    of_rows, of_columns = (np.stack((1 - share[:, axis], share[:, axis]), 1) for axis in (0, 1))
    indices = (rows[:, :, None] * side + columns[:, None, :]).reshape(-1, 4)
    return indices, (of_rows[:, :, None] * of_columns[:, None, :]).reshape(-1, 4).astype(np.float32)
