"""Exact percentiles of small samples."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the nearest-rank percentile: the smallest value that at least `share` of all do not exceed; nan if
    there is none."""
    if not ordered:
        return math.nan
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def spread_ms(name: str, seconds: Sequence[float], shares: Sequence[float]) -> dict[str, float]:
    """Returns {name}_p50_ms, {name}_p99.9_ms, {name}_max_ms (share 1), ...; empty without measurements."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    ranks = {share: "max" if share == 1 else f"p{share * 100:g}" for share in shares}
    return {f"{name}_{rank}_ms": percentile(ordered, share) * 1e3 for share, rank in ranks.items()}
