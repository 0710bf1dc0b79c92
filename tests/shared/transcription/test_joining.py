"""Texts of pieces are joined without lost and doubled words."""

from __future__ import annotations

from quire.shared.transcription.joining import joined, joined_at_overlap


def test_pieces_are_joined_by_the_language() -> None:
    assert joined([" one two ", "", "  ", "three"], "en") == "one two three"
    assert joined(["你好", "世界"], "zh") == "你好世界"
    assert joined(["こんにちは ", "世界"], "ja") == "こんにちは世界"
    assert joined([]) == ""


def test_words_of_an_overlap_appear_once() -> None:
    """vllm#29350: a word at the end of a piece was said again at the start of the next."""
    left = ["all", "these", "conversations", "are", "what", "have", "kept", "me"]
    right = ["kept", "me", "honest,", "kept", "me", "inspired"]
    assert " ".join(joined_at_overlap(left, right, 4)) == (
        "all these conversations are what have kept me honest, kept me inspired"
    )


def test_words_that_the_cut_split_are_taken_from_the_piece_that_has_them_whole() -> None:
    left, right = ["we", "went", "to", "the", "transcrip"], ["ent", "to", "the", "transcription", "office"]
    assert joined_at_overlap(left, right, 4) == ["we", "went", "to", "the", "transcription", "office"]


def test_case_and_punctuation_do_not_hide_equal_words() -> None:
    assert joined_at_overlap(["Well,", "thank", "you."], ["Thank", "you", "all."], 3) == [
        "Well,",
        "thank",
        "you.",
        "all.",
    ]


def test_pieces_without_equal_words_keep_all_of_them() -> None:
    assert joined_at_overlap(["one"], ["two"], 3) == ["one", "two"]
    assert joined_at_overlap([], ["two"], 3) == ["two"]
    assert joined_at_overlap(["one"], [], 3) == ["one"]
    assert joined_at_overlap(["—"], ["…", "b"], 3) == ["—", "…", "b"]


def test_repeated_words_of_pieces_that_do_not_overlap_stay() -> None:
    assert joined_at_overlap(["no,", "no"], ["no,", "never"], 0) == ["no,", "no", "no,", "never"]
