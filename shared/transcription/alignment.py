"""Dynamic time warping: the path through the attention of tokens to sound, from which tokens have times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from quire.shared.columns import F32, I32

    F64 = npt.NDArray[np.float64]
    U8 = npt.NDArray[np.uint8]

DIAGONAL, DOWN, RIGHT = 0, 1, 2  # the step that reaches a cell: from the token and the row before, or from one of them


def first_rows(alignment: F32) -> I32:
    """Returns the first row of sound of each token on the path of greatest attention, ascending, [num_tokens].

    `alignment`: attention of each token to each row, [num_tokens, num_rows]. The path begins at the first row of the
    first token and ends at the last row of the last one.
    """
    num_tokens, num_rows = alignment.shape
    steps = _steps(-alignment.astype(np.float64))
    found = np.zeros(num_tokens, dtype=np.int32)
    token, row = num_tokens, num_rows
    while token > 0 and row > 0:
        found[token - 1] = row - 1
        step = steps[token, token + row]
        token -= step != RIGHT
        row -= step != DOWN
    return found


def _steps(cost: F64) -> U8:
    """Returns the step by which the cheapest path reaches each cell, uint8 [num_tokens + 1, num_tokens + num_rows + 1]:
    the cell of a token and a row, both counted from 1, is in the column of their sum.

    The cells of one anti-diagonal depend on those of the two before, and are computed together.
    """
    num_tokens, num_rows = cost.shape
    steps = np.full((num_tokens + 1, num_tokens + num_rows + 1), RIGHT, dtype=np.uint8)
    before, last = np.full(num_tokens + 1, np.inf), np.full(num_tokens + 1, np.inf)
    before[0] = 0.0  # anti-diagonal 0: the start; anti-diagonal 1 has no cell that a path reaches
    for total in range(2, num_tokens + num_rows + 1):
        tokens = np.arange(max(1, total - num_rows), min(num_tokens, total - 1) + 1)
        diagonal, down, right = before[tokens - 1], last[tokens - 1], last[tokens]
        step = np.where((diagonal < down) & (diagonal < right), DIAGONAL, RIGHT)
        step = np.where((down < diagonal) & (down < right), DOWN, step)
        steps[tokens, total] = step
        reached = np.full(num_tokens + 1, np.inf)
        cheapest = np.choose(step, (diagonal, down, right))
        reached[tokens] = cost[tokens - 1, total - tokens - 1] + cheapest
        before, last = last, reached
    return steps
