"""Conversations of several turns that share their beginnings: what placement has to deal with."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt that others have too, and what the user says in each turn."""

    system: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]


def conversations(
    count: int, *, groups: int, seed: int = 0, system: int = 512, turn: int = 64, turns: int = 5
) -> list[Conversation]:
    """`count` conversations; each of `groups` system prompts begins an equal part of them. Lengths in tokens."""
    draw = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.randint(10, 4000) for _ in range(length))

    systems = [tokens(system) for _ in range(groups)]
    return [Conversation(systems[i % groups], tuple(tokens(turn) for _ in range(turns))) for i in range(count)]
