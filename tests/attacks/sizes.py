"""Sizes of the attacks' inputs."""

from __future__ import annotations

MB = 1_000_000
MIB = 1 << 20
WORDS = "the quick brown fox jumps over the lazy dog, "


def words(characters: int) -> str:
    return (WORDS * (characters // len(WORDS) + 1))[:characters]
