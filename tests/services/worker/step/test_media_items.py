"""Rows of an item fall on the positions of its runs, in any window; unknown placeholders are masked there alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.services.worker.step.media_items import MediaItem, last_row_end, without_unknown_placeholders

NAME = b"i" * 32


def item(offset: int, length: int, *runs: tuple[int, int]) -> MediaItem:
    return MediaItem(NAME, offset, length, sum(count for _, count in runs) or length, runs)


def test_windows_of_any_size_cover_each_row_once() -> None:
    """The layout of a tiled picture: rows with a separator after each."""
    chance = random.Random(1)
    tiled = item(11, 30, *[(start, 4) for start in range(1, 27, 5)])
    wanted = [(11 + start + i, 4 * run + i) for run, (start, _) in enumerate(tiled.runs) for i in range(4)]
    for _ in range(100):
        found, begin = [], 0
        while begin < 60:
            end = begin + chance.randint(1, 9)
            for position, row, count in tiled.rows_in(begin, end):
                assert begin <= position < position + count <= end
                found += [(position + i, row + i) for i in range(count)]
            begin = end
        assert found == wanted


@pytest.mark.parametrize(
    ("length", "rows", "runs"),
    [
        (4, 4, ((0, 5),)),
        (4, 3, ((0, 4),)),
        (4, 0, ((0, 0),)),
        (9, 4, ((3, 2), (2, 2))),
        (9, 4, ((0, 2), (1, 2))),
        (0, 0, ()),
        (5, 4, ()),
    ],
)
def test_runs_that_do_not_hold_the_rows_are_refused(length: int, rows: int, runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="embedding_runs"):
        MediaItem(NAME, 3, length, rows, runs)


def test_only_placeholders_under_rows_are_masked() -> None:
    tokens = np.array([1, 99, 99, 2, 99, 3], dtype=np.int32)
    items = [item(1, 3, (0, 2))]
    assert without_unknown_placeholders(tokens, items, 50).tolist() == [1, 0, 0, 2, 99, 3]
    assert without_unknown_placeholders(tokens, items, 100) is tokens


def test_the_last_row_ends_before_the_text_behind_it() -> None:
    assert last_row_end([item(0, 10, (1, 4)), item(10, 10, (2, 3))]) == 15
    assert last_row_end([]) == 0
