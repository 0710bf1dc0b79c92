"""Tokens per second, as `quire status` and the dashboards show them."""

from __future__ import annotations

import pytest

from quire.services.scheduler.replicas.throughput import WINDOW_S, Throughput


def test_idle_time_does_not_count() -> None:
    throughput = Throughput()
    assert throughput.tokens_per_s(0.0) == 0
    for now in (0.0, 0.5, 1.0, 5.0, 5.5):  # four seconds without steps
        throughput.observe(4, now)
    assert throughput.tokens_per_s(5.5) == throughput.tokens_per_s(5.5 + WINDOW_S) == pytest.approx(16 / 1.5)
    assert throughput.tokens_per_s(5.6 + WINDOW_S) == 0, "what was long ago is not what is"
    throughput.observe(4, 100.0)
    throughput.observe(4, 100.5)
    assert throughput.tokens_per_s(100.5) > 0
