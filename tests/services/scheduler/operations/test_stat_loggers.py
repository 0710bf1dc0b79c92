"""Periodic statistics of workers."""

from __future__ import annotations

import pytest

from quire.services.scheduler.operations.stat_loggers import StatsReporter, WorkerStats, find, log_line
from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2 as pb


def worker(epoch: int, generated: int, **more: int) -> pb.ServiceStatus:
    work = pb.WorkCounts(prompt_tokens=100, cached_tokens=40, generated_tokens=generated)
    blocks = pb.BlockCounts(total=200, used=50)
    return pb.ServiceStatus(id="worker-0", epoch=epoch, work=work, blocks=blocks, **more)


def test_figures_are_per_interval_and_an_attachment_repeats_none() -> None:
    """A worker's counters outlive its attachments, also if it is away at the time of a report."""
    seen: list[WorkerStats] = []
    workers = [worker(1, 500)]
    reporter = StatsReporter([("list", seen.append)], 10.0, lambda: "tiny", lambda: workers)
    reporter.report(1e6)
    workers[:] = [worker(1, 800, running=3, waiting=1)]
    reporter.report(1e6 + 10)
    workers[:] = [worker(2, 820)]
    reporter.report(1e6 + 20)
    workers.clear()
    reporter.report(1e6 + 30)
    workers[:] = [worker(3, 825)]
    reporter.report(1e6 + 40)
    assert [stats.generated_tokens for stats in seen] == [500, 300, 20, 5]
    assert (seen[1].seconds, seen[1].prompt_tokens, seen[1].running, seen[1].waiting) == (10.0, 0, 3, 1)
    assert seen[1].kv_usage == 0.25
    assert seen[0].model == "tiny"


def test_a_failing_logger_is_disabled_alone(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[WorkerStats] = []

    def broken(_stats: WorkerStats) -> None:
        raise ZeroDivisionError

    reporter = StatsReporter([("broken", broken), ("list", seen.append)], 10.0, lambda: "tiny", lambda: [worker(1, 5)])
    reporter.report(1e6)
    reporter.report(1e6 + 1)
    assert len(seen) == 2
    assert len([record for record in caplog.records if "stat logger failed" in record.message]) == 1


def test_the_log_has_a_line_per_active_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    idle = WorkerStats("worker-1", "tiny", 10.0, 0, 0, 0, 0, 0, 0, 0.0)
    log_line(idle)
    assert not caplog.records
    log_line(WorkerStats("worker-0", "tiny", 10.0, 1000, 250, 4000, 0, 8, 2, 0.5))
    (record,) = caplog.records
    values = record.values  # type: ignore[attr-defined]
    assert values["prompt_tokens_per_s"] == 100.0
    assert values["generation_tokens_per_s"] == 400.0
    assert values["prefix_cache_hit_rate"] == "25.0%"
    assert values["kv_cache_usage"] == "50.0%"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"stat_loggers: 'nobodys' does not exist; available: log"):
        find(["nobodys"])
