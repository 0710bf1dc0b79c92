"""Breakdown of step times from the services' histograms: difference between two scrapes of /metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from quire.bench.load_client.http_calls import root_of

WHOSE = ("worker", "engine")  # labels that identify a process rather than a part
WORKER_PHASES = tuple(f"worker_step_phase_{phase}" for phase in ("wait", "prepare", "forward", "sample"))
ROUND_TRIP = "scheduler_step"


@dataclass(slots=True)
class Sums:
    """Counts and total durations in seconds, by part."""

    counts: dict[str, float] = field(default_factory=dict)
    totals_s: dict[str, float] = field(default_factory=dict)


def read(pages: Mapping[str, str]) -> Sums:
    """Reads the metrics pages (HOST:PORT by service) and returns the step times summed over the services of each
    role."""
    sums = Sums()
    for address in pages.values():
        with urllib.request.urlopen(f"{root_of(address)}/metrics", timeout=10) as response:
            add(sums, response.read().decode())
    return sums


def add(sums: Sums, page: str) -> None:
    """Adds every histogram quire_..._seconds of a page, keyed by its name and labels."""
    for family in text_string_to_metric_families(page):
        if family.type != "histogram" or not family.name.startswith("quire_") or not family.name.endswith("_seconds"):
            continue
        part = family.name.removeprefix("quire_").removesuffix("_seconds")
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name not in (*WHOSE, "le")]
            where = "_".join([part, *labels])
            if sample.name.endswith("_count"):
                sums.counts[where] = sums.counts.get(where, 0.0) + sample.value
            elif sample.name.endswith("_sum"):
                sums.totals_s[where] = sums.totals_s.get(where, 0.0) + sample.value


def means_us(before: Sums, after: Sums) -> dict[str, float]:
    """Returns us_<part>: mean durations between two readings, microseconds; us_hop: from scheduler to worker and
    back."""
    means = {}
    for part, count in after.counts.items():
        new = count - before.counts.get(part, 0.0)
        if new > 0:
            means[f"us_{part}"] = (after.totals_s[part] - before.totals_s.get(part, 0.0)) / new * 1e6
    phases = [f"us_{phase}" for phase in WORKER_PHASES]
    if f"us_{ROUND_TRIP}" in means and all(phase in means for phase in phases):
        means["us_hop"] = means[f"us_{ROUND_TRIP}"] - sum(means[phase] for phase in phases)
    return means
