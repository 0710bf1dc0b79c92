"""Joining of the texts of neighbouring pieces of sound."""

from __future__ import annotations

from collections.abc import Iterable

# ISO 639 codes of languages that are written without spaces between words.
WITHOUT_SPACES = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km", "bo"})


def joined(texts: Iterable[str], language: str = "") -> str:
    """Returns the texts of pieces that do not overlap, in order, as one text; empty ones leave no gap."""
    separator = "" if language in WITHOUT_SPACES else " "
    return separator.join(text for each in texts if (text := each.strip()))
