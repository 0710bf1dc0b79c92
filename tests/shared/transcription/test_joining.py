"""Texts of pieces are joined without lost words."""

from __future__ import annotations

import pytest

from quire.shared.transcription.joining import joined, num_repeated


def test_pieces_are_joined_by_the_language() -> None:
    assert joined([" one two ", "", "  ", "three"], "en") == "one two three"
    assert joined(["你好", "世界"], "zh") == "你好世界"
    assert joined(["こんにちは ", "世界"], "ja") == "こんにちは世界"
    assert joined([]) == ""


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (["do", "it", "for", "free."], ["For", "free", "now"], 2),
        (["do", "it", "for", "free."], ["free.", "now"], 0),
        (["do", "it", "for", "free."], ["free"], 1),
        (["no,", "no,", "no"], ["no", "no"], 2),
        (["a", "b"], ["b", "a"], 0),
        (["?"], ["?"], 0),
        ([], ["a"], 0),
        (["a"], [], 0),
    ],
)
def test_repeated_words_at_a_border_are_counted(before: list[str], after: list[str], count: int) -> None:
    assert num_repeated(before, after) == count
