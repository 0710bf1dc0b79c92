"""Joining of the texts of neighbouring pieces of sound."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

# ISO 639 codes of languages that are written without spaces between words.
WITHOUT_SPACES = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km", "bo"})


def joined(texts: Iterable[str], language: str = "") -> str:
    """Returns the texts of pieces that do not overlap, in order, as one text; empty ones leave no gap."""
    separator = "" if language in WITHOUT_SPACES else " "
    return separator.join(text for each in texts if (text := each.strip()))


def joined_at_overlap(left: Sequence[str], right: Sequence[str], most_words: int) -> list[str]:
    """Returns the words of two pieces whose sound overlaps, each word of the overlap once.

    The longest run of equal words near the end of `left` and the start of `right` is where they are joined; words of
    `left` after it and of `right` before it were cut by the ends of the pieces. Without such a run all words are kept.
    `most_words`: words that the overlap can have."""
    tail, head = left[-most_words:] if most_words else [], right[:most_words]
    matcher = SequenceMatcher(None, [*map(_plain, tail)], [*map(_plain, head)], autojunk=False)
    match = matcher.find_longest_match()
    if not match.size or not any(map(_plain, tail[match.a : match.a + match.size])):
        return [*left, *right]
    kept = len(left) - len(tail) + match.a + match.size
    return [*left[:kept], *right[match.b + match.size :]]


def _plain(word: str) -> str:
    """Returns a word without case and punctuation, by which words are compared."""
    return "".join(char for char in word.casefold() if unicodedata.category(char)[0] in "LNM")
