"""How fast one side is beside another, from runs in which they took turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    value: float
    error: float | None  # one standard deviation of the value; None: too few runs to tell


def of_rounds(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """Each round's ratio, and their geometric mean.

    Runs of a round are near in time, so that a machine that gets slower over minutes does not show. Sides take turns
    there and back: over a pair of rounds each comes as early as the other, and such pairs tell the error.
    """
    logs = [math.log(mine / other) for mine, other in zip(ours, others, strict=True)]
    pairs = [statistics.mean(pair) for pair in zip(logs[::2], logs[1::2], strict=False)]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    value = math.exp(statistics.mean(logs))
    return Ratio(value, None if error is None else value * error)
