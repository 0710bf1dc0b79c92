"""Quire's histogram and the client library's give the same page."""

from __future__ import annotations

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quire.shared.metrics.histogram import Histogram

EDGES = (0.001, 0.01, 1, 16)


def page(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@pytest.mark.parametrize("labels", [(), ("worker",)])
def test_a_page_is_that_of_the_client_library(labels: tuple[str, ...]) -> None:
    pages = []
    for kind in (prometheus_client.Histogram, Histogram):
        registry = CollectorRegistry()
        histogram = kind("quire_test_seconds", "What is measured", labels, buckets=EDGES, registry=registry)
        draw = random.Random(1)
        for i in range(200):
            series = histogram.labels(f"w{i % 3}") if labels else histogram
            series.observe(draw.choice([0.001, 0.5, 1, 16, 17, draw.expovariate(1)]))
        pages.append(page(registry))
    assert pages[0] == pages[1]
    assert len(pages[0]) > 6


def test_two_of_one_name_are_refused() -> None:
    registry = CollectorRegistry()
    Histogram("quire_test_seconds", "What is measured", buckets=EDGES, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("quire_test_seconds", "What is measured", buckets=EDGES, registry=registry)
