"""Tokens become words: at spaces, or character by character where a language has none; pauses are in no word."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from quire.shared.transcription.transcript import Word
from quire.shared.transcription.words import timed_words, trimmed_words, words_of

RATE = 16_000


def texts(pieces: list[bytes], language: str = "en") -> list[tuple[str, int]]:
    """Returns the words of tokens whose bytes are `pieces`."""

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    return [(word.text, word.num_tokens) for word in words_of(range(len(pieces)), decode, language)]


def split(text: str) -> list[bytes]:
    """Returns one token per character."""
    return [one.encode() for one in text]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b" I", b" tr", b"ust", b" you", b"."], [(" I", 1), (" trust", 2), (" you.", 2)]),
        ([b' "', b"Go", b'!"', b" he", b" said"], [(' "Go!"', 3), (" he", 1), (" said", 1)]),
        ([b" It", b"'s", b" 20", b"14", b"."], [(" It's", 2), (" 2014.", 3)]),  # whisperX#253: numbers have times
        ([b" It", b" costs", b" \xc2\xa3", b"13", b".", b"60"], [(" It", 1), (" costs", 1), (" £13.60", 4)]),
        ([b" caf", b"\xc3", b"\xa9", b" ", b"-", b" bar"], [(" café -", 5), (" bar", 1)]),
        ([b"well", b",", b" no", b"..", b"."], [("well,", 2), (" no...", 3)]),
        ([b" \xf0\x9f", b"\x8e", b"\xb5", b" la"], [(" 🎵", 3), (" la", 1)]),
        ([b"\xe2\x80", b" bad"], [("\ufffd bad", 2)]),
        ([b" ?"], [(" ?", 1)]),
        ([], []),
    ],
)
def test_words_of_languages_with_spaces(pieces: list[bytes], words: list[tuple[str, int]]) -> None:
    assert texts(pieces) == words


@pytest.mark.parametrize(
    ("pieces", "language", "words"),
    [
        (split("今天不是"), "zh", [("今", 1), ("天", 1), ("不", 1), ("是", 1)]),
        (split("好。「天」氣"), "zh", [("好。", 2), ("「天」", 3), ("氣", 1)]),
        ([b"GP", b"T", *split("は良い")], "ja", [("GPT", 2), ("は", 1), ("良", 1), ("い", 1)]),
        ([b"\xe4\xbb", b"\x8a", *split("天")], "yue", [("今", 2), ("天", 1)]),
        (split("今天"), "en", [("今天", 2)]),
    ],
)
def test_words_of_languages_without_spaces(pieces: list[bytes], language: str, words: list[tuple[str, int]]) -> None:
    assert texts(pieces, language) == words


def test_every_token_is_in_one_word() -> None:
    pieces = [b" a", b"b", b",", b' "', b"(", b"\xc3", b"\xa9", b" ", b"."]
    for length in range(5):
        for chosen in itertools.product(pieces, repeat=length):
            for language in ("en", "ja"):
                found = texts(list(chosen), language)
                assert sum(count for _, count in found) == length
                whole = b"".join(chosen).decode(errors="replace")
                if "\ufffd" not in whole:
                    assert "".join(text for text, _ in found) == whole


def test_times_are_those_of_the_tokens() -> None:
    words = words_of([0, 1, 2], lambda tokens: "".join([" a", "b", " c"][token] for token in tokens))
    found = timed_words(words, [0.0, 0.5, 0.75, 1.0], 10.0)
    assert found == [Word(10.0, 10.75, "ab"), Word(10.75, 11.0, "c")]


def test_a_pause_is_in_no_word() -> None:
    """buzz#1339 and faster-whisper#125: a word before or after a long silence has its time."""
    sound = np.full(10 * RATE, 1e-4, np.float32)
    for start, end in ((1.0, 2.0), (7.0, 8.0)):
        sound[int(start * RATE) : int(end * RATE)] = 0.2
    words = [Word(101.0, 101.5, "From"), Word(101.5, 106.9, "here"), Word(106.9, 107.5, "now"), Word(107.5, 110, "on")]
    found = [(round(word.start, 2), round(word.end, 2)) for word in trimmed_words(words, sound, RATE, 100.0)]
    assert found == [(101.0, 101.5), (101.5, 102.0), (107.0, 107.5), (107.5, 108.0)]
    early = trimmed_words([Word(102.5, 107.6, "Oh")], sound, RATE, 100.0)[0]
    assert (round(early.start, 2), round(early.end, 2)) == (107.0, 107.6)
    silent = [Word(103.0, 104.0, "?")]
    assert trimmed_words(silent, sound, RATE, 100.0) == silent
    assert trimmed_words(silent, sound[:0], RATE, 100.0) == silent


def test_words_without_a_time_share_that_of_a_neighbour() -> None:
    """whisperX#31, #253: every word has a start and an end, whatever the alignment gave it."""
    sound = np.full(5 * RATE, 0.1, np.float32)
    words = [Word(1.0, 1.0, "Historic"), Word(1.0, 1.6, "even"), Word(1.6, 2.2, "some"), Word(2.2, 2.2, "such")]
    found = trimmed_words(words, sound, RATE, 0.0)
    np.testing.assert_allclose([(one.start, one.end) for one in found], [(1, 1.4), (1.4, 1.6), (1.6, 1.9), (1.9, 2.2)])
    assert [one.text for one in found] == [one.text for one in words]


def test_the_first_word_does_not_begin_with_the_noise_before_it() -> None:
    sound = np.full(5 * RATE, 0.1, np.float32)
    words = [
        Word(0.0, 2.0, "I"),
        Word(2.0, 2.3, "sleep"),
        Word(2.3, 2.6, "with"),
        Word(2.6, 2.9, "it."),
        Word(2.9, 3.2, "a"),
    ]
    found = trimmed_words(words, sound, RATE, 0.0)
    assert (found[0].start, found[0].end) == pytest.approx((1.4, 2.0))
    assert found[1:] == words[1:]
    last = [*words[1:], Word(3.2, 5.0, "end.")]
    assert trimmed_words(last, sound, RATE, 0.0)[-1].end == pytest.approx(3.8)
