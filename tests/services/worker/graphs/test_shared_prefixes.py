"""Detection of shared prefixes of decode rows, and their tiles."""

from __future__ import annotations

import numpy as np

from quire.services.worker.graphs.shared_prefixes import Group, cut, find_groups, num_tiles

BLOCK_SIZE = 16


def find(tables: list[list[int]], seq_lens: list[int]) -> list[tuple[list[int], int]]:
    """Returns rows and blocks of each group; slots are the rows."""
    width = max(map(len, tables)) + 1
    table = np.array([row + [0] * (width - len(row)) for row in tables], dtype=np.int32)
    found = find_groups(
        table, np.arange(len(tables)), np.array(seq_lens, dtype=np.int32), BLOCK_SIZE, least_saved=3 * BLOCK_SIZE
    )
    return [(group.rows.tolist(), group.num_blocks) for group in found]


def test_rows_with_shared_prefixes_are_found() -> None:
    tables = [[5, 6, 7, 1], [5, 6, 7, 2], [9, 3], [5, 6, 8, 4], [5, 6, 7, 10]]
    assert find(tables, [60, 61, 30, 62, 63]) == [([0, 1, 3, 4], 2)]


def test_the_block_of_the_last_position_is_never_shared() -> None:
    """That block is still being written, or its last token is computed again."""
    tables = [[5, 6, 7]] * 4
    assert find(tables, [33, 40, 48, 48]) == [([0, 1, 2, 3], 2)]
    assert find(tables, [32, 40, 48, 48]) == [([0, 1, 2, 3], 1)]
    assert find(tables, [1, 2, 3, 16]) == []


def test_few_rows_and_small_savings_are_not_grouped() -> None:
    assert find([[5, 6, 1], [5, 6, 2], [5, 6, 3]], [40] * 3) == []
    assert find([[5, 1], [5, 2], [5, 3], [5, 4]], [20] * 4) == [([0, 1, 2, 3], 1)]
    assert find([[5, 1], [5, 2], [5, 3], [6, 4]], [20] * 4) == []


def test_null_blocks_are_not_shared() -> None:
    """Block tables name block 0 where a window has moved past a block."""
    assert find([[0, 0, 5]] * 8, [40] * 8) == []


def test_the_largest_saving_comes_first() -> None:
    tables = [[5, 1], [6, 7, 8, 2]] * 5
    assert find(tables, [17, 50] * 5) == [([1, 3, 5, 7, 9], 3), ([0, 2, 4, 6, 8], 1)]


def test_groups_are_split_into_tiles_and_rows_have_start_positions() -> None:
    groups = [Group(np.array([0, 2, 3]), 4), Group(np.array([1, 5]), 1)]
    tiles = cut(groups, 8, 2, BLOCK_SIZE)
    assert tiles is not None
    assert len(tiles.members) == num_tiles(8, 2) == 12
    assert tiles.members[:4].tolist() == [[0, 2], [3, -1], [1, 5], [-1, -1]]
    assert tiles.tables[:3].tolist() == [0, 0, 1]
    assert tiles.lens[:4].tolist() == [64, 64, 16, 0]
    assert tiles.starts.tolist() == [64, 16, 64, 64, 0, 16, 0, 0]


def test_groups_beyond_the_tiles_are_left_out() -> None:
    groups = [Group(np.arange(4 * i, 4 * i + 4), 2) for i in range(14)]
    tiles = cut(groups, 56, 32, BLOCK_SIZE)
    assert tiles is not None
    assert np.count_nonzero(tiles.lens) == num_tiles(56, 32) == 12
    assert np.count_nonzero(tiles.starts) == 48
    assert cut([], 8, 2, BLOCK_SIZE) is None
