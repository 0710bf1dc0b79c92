"""The rule for greedy decoding, shared by validation, scheduling and sampling."""

from __future__ import annotations

GREEDY_BELOW = 1e-5


def is_greedy(temperature: float) -> bool:
    return temperature < GREEDY_BELOW
