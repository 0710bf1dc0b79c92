"""Conversations of several turns with common beginnings, as a workload for placement."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conversation:
    """A shared system prompt, and the user's messages."""

    system: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]


def conversations(
    count: int, *, groups: int, seed: int = 0, system: int = 512, turn: int = 64, turns: int = 5
) -> list[Conversation]:
    """Returns `count` conversations, divided evenly among `groups` system prompts. Lengths in tokens."""
    draw = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.randint(10, 4000) for _ in range(length))

    systems = [tokens(system) for _ in range(groups)]
    return [Conversation(systems[i % groups], tuple(tokens(turn) for _ in range(turns))) for i in range(count)]
