"""Joining of the texts of neighbouring pieces of sound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# ISO 639 codes of languages that are written without spaces between words.
WITHOUT_SPACES = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km", "bo"})
MOST_REPEATED = 16  # words at the border of two texts


def joined(texts: Iterable[str], language: str = "") -> str:
    """Returns the texts of pieces that do not overlap, in order, as one text; empty ones leave no gap."""
    separator = "" if language in WITHOUT_SPACES else " "
    return separator.join(text for each in texts if (text := each.strip()))


def num_repeated(before: Sequence[str], after: Sequence[str]) -> int:
    """Returns the number of words at the beginning of `after` with which `before` ends, whatever their case and
    punctuation: at least two, or all of `after`, since a speaker may say a word twice."""
    ended, begun = [_bare(word) for word in before], [_bare(word) for word in after]
    for count in range(min(len(ended), len(begun), MOST_REPEATED), 0, -1):
        if ended[-count:] == begun[:count] and any(begun[:count]):
            return count if count > 1 or len(begun) == 1 else 0
    return 0


def _bare(word: str) -> str:
    """Returns the letters and digits of a word in lower case."""
    return "".join(one for one in word.casefold() if one.isalnum())
