"""Robust trend estimation: slope, confidence interval and verdict.

Sen's slope (the median of the slopes between all pairs) of the medians of windows, which is insensitive to short
peaks and single steps. The interval is Kendall's; because neighbouring windows are correlated, its variance is
inflated by the autocorrelation of the ranks as Hamed and Rao (1998) describe.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

WINDOWS = 24
FEWEST = 6  # minimum number of points: with fewer, no order is significant
SURE = 1.96  # standard deviations, for an interval of 95 %

FLAT, GROWS, UNCLEAR = "flat", "grows", "unclear"


@dataclass(frozen=True, slots=True)
class Slope:
    """Slope per unit of x, with its 95 % interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Slope:
        """Returns the slope scaled by `factor` > 0."""
        return Slope(self.value * factor, self.low * factor, self.high * factor)

    def verdict(self, most: float) -> str:
        """Returns FLAT if 0 is within the interval and its upper end is at most `most`; GROWS if all of it is above
        0; UNCLEAR if it is so wide that more samples are needed. A negative trend counts as flat."""
        if self.low > 0:
            return GROWS
        return FLAT if self.high <= most else UNCLEAR


def slope(points: Sequence[tuple[float, float]], windows: int = WINDOWS) -> Slope | None:
    """Returns the slope of (x, y) points in order of x; None if there are too few."""
    points = _medians(points, windows)
    if len(points) < FEWEST:
        return None
    slopes = sorted((later[1] - early[1]) / (later[0] - early[0]) for early, later in combinations(points, 2))
    value = statistics.median(slopes)
    left = [y - value * x for x, y in points]
    deviation = math.sqrt(_variance([y for _, y in points]) * _inflation(left))
    reach = SURE * deviation
    first, last = (len(slopes) - reach) / 2, (len(slopes) + reach) / 2
    return Slope(value, slopes[max(0, math.floor(first))], slopes[min(len(slopes) - 1, math.ceil(last))])


def _medians(points: Sequence[tuple[float, float]], windows: int) -> list[tuple[float, float]]:
    """Returns the medians of windows with nearly equal numbers of points."""
    ends = [round(number * len(points) / windows) for number in range(windows + 1)]
    parts = [points[begin:end] for begin, end in pairwise(ends) if begin < end]
    return [(statistics.median(x for x, _ in part), statistics.median(y for _, y in part)) for part in parts]


def _variance(values: Sequence[float]) -> float:
    """Returns the variance of Kendall's S without a trend, with ties."""
    count = len(values)
    ties = [values.count(value) for value in set(values)]
    return (_pairs_variance(count) - sum(_pairs_variance(size) for size in ties)) / 18


def _pairs_variance(count: int) -> float:
    return count * (count - 1) * (2 * count + 5)


def _inflation(values: Sequence[float]) -> float:
    """Returns the factor by which correlation of neighbours inflates the variance; at least 1."""
    count = len(values)
    by_rank = {value: statistics.mean(_ranks(values, value)) for value in set(values)}
    ranks = [by_rank[value] for value in values]
    mean = statistics.mean(ranks)
    spread = sum((rank - mean) ** 2 for rank in ranks)
    if spread == 0:
        return 1.0
    total = 0.0
    for lag in range(1, count // 2):
        pairs = zip(ranks, ranks[lag:], strict=False)
        alike = sum((one - mean) * (other - mean) for one, other in pairs) / spread
        if abs(alike) > SURE / math.sqrt(count):  # smaller correlations may be chance
            total += (count - lag) * (count - lag - 1) * (count - lag - 2) * alike
    return max(1.0, 1 + 2 * total / (count * (count - 1) * (count - 2)))


def _ranks(values: Sequence[float], value: float) -> range:
    """Returns the mean rank of equal values."""
    below = sum(other < value for other in values)
    return range(below, below + values.count(value))
