"""Exact order statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest value that at least `share` of all do not exceed; nan if there is none."""
    if not ordered:
        return math.nan
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def spread_ms(name: str, seconds: Sequence[float], shares: Sequence[float] = (0.5, 0.9, 0.99)) -> dict[str, float]:
    """{name}_p50_ms, {name}_p90_ms, ...; empty if nothing was measured."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"{name}_p{share * 100:g}_ms": percentile(ordered, share) * 1e3 for share in shares}
