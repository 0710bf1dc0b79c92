"""Texts of pieces are joined without lost words."""

from __future__ import annotations

from quire.shared.transcription.joining import joined


def test_pieces_are_joined_by_the_language() -> None:
    assert joined([" one two ", "", "  ", "three"], "en") == "one two three"
    assert joined(["你好", "世界"], "zh") == "你好世界"
    assert joined(["こんにちは ", "世界"], "ja") == "こんにちは世界"
    assert joined([]) == ""
