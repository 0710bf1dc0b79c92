"""Speed ratio of two sides that took turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    value: float
    error: float | None  # one standard deviation; None: too few runs


def ratio_of_rounds(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """Returns each round's ratio and their geometric mean.

    Runs of a round are close in time, so slow drifts of the machine cancel out. Sides alternate forwards and
    backwards: over a pair of rounds each is as early as the other, and the error is estimated from such pairs.
    """
    logs = [math.log(mine / other) for mine, other in zip(ours, others, strict=True)]
    pairs = [statistics.mean(pair) for pair in zip(logs[::2], logs[1::2], strict=False)]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    value = math.exp(statistics.mean(logs))
    return Ratio(value, None if error is None else value * error)
