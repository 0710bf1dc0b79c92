"""When a request takes the likeliest token instead of sampling: the one rule for all who refuse, settle or sample."""

from __future__ import annotations

GREEDY_BELOW = 1e-5


def is_greedy(temperature: float) -> bool:
    return temperature < GREEDY_BELOW
