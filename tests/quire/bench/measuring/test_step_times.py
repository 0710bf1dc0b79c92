"""The difference of two metrics pages, as means."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from quire.bench.measuring import service_cpu, step_times


class Services:
    """Histograms of a scheduler and a worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.step = Histogram("quire_scheduler_step_seconds", "x", ["worker"], registry=self.registry)
        self.phase = Histogram("quire_worker_step_phase_seconds", "x", ["phase"], registry=self.registry)
        Histogram("vllm:e2e_request_latency_seconds", "x", registry=self.registry).observe(1)

    def run_step(self, milliseconds: float) -> None:
        self.step.labels("worker-0").observe((4 * milliseconds + 2) / 1000)
        for phase in ("wait", "prepare", "forward", "sample"):
            self.phase.labels(phase).observe(milliseconds / 1000)

    def sums(self) -> step_times.Sums:
        sums = step_times.Sums()
        step_times.add(sums, generate_latest(self.registry).decode())
        return sums


def test_means_are_of_what_happened_in_between() -> None:
    services = Services()
    services.run_step(1000)
    before = services.sums()
    services.run_step(1)
    services.run_step(3)
    means = step_times.means_us(before, services.sums())
    assert means["us_worker_step_phase_forward"] == pytest.approx(2000)
    assert means["us_scheduler_step"] == pytest.approx(10_000)
    assert means["us_hop"] == pytest.approx(2000)
    assert not any("e2e" in name for name in means)


def test_nothing_happened_means_nothing_to_say() -> None:
    services = Services()
    services.run_step(1)
    assert step_times.means_us(services.sums(), services.sums()) == {}


def test_cpu_time_is_added_up_by_role() -> None:
    before = {"worker-0": 1.0, "worker-1": 1.0, "frontend-0": 2.0, "gone-0": 1.0}
    after = {"worker-0": 1.5, "worker-1": 2.5, "frontend-0": 2.0}
    assert service_cpu.per_token(before, after, 1_000_000) == {"cpu_us_tok_frontend": 0.0, "cpu_us_tok_worker": 2.0}
