"""Decision between fetching KV and computing it."""

from __future__ import annotations

from quire.services.scheduler.replicas.worker_links import (
    FIRST_BYTES_PER_S,
    MAX_SKIPPED,
    OVERHEAD_S,
    RETRY_AFTER_SKIPPED,
    WorkerLink,
)

MB = 1_000_000


def test_the_rate_follows_the_measurements() -> None:
    link = WorkerLink()
    assert link.bytes_per_s == FIRST_BYTES_PER_S
    for _ in range(3):
        link.observe(100 * MB, 0.1)
    assert round(link.bytes_per_s / MB) == 1000
    link.observe(0, 1.0)
    link.observe(MB, 0.0)
    assert round(link.bytes_per_s / MB) == 1000, "neither says anything"
    link.observe(100 * MB, 1.0)
    assert 200 < link.bytes_per_s / MB < 400


def test_blocks_slower_to_compute_are_fetched() -> None:
    link = WorkerLink()
    fetch_s = link.seconds_for(20 * MB)
    assert link.is_worth_fetching(20 * MB, fetch_s * 1.01)
    assert not link.is_worth_fetching(20 * MB, fetch_s * 0.99)
    assert not link.is_worth_fetching(1, OVERHEAD_S), "a few tokens are computed"


def test_nothing_is_fetched_while_the_compute_time_is_unknown() -> None:
    assert not any(WorkerLink().is_worth_fetching(1, 0.0) for _ in range(RETRY_AFTER_SKIPPED + 2))


def test_a_slow_link_is_retried() -> None:
    link = WorkerLink()
    link.observe(MB, 10.0)
    tried = [link.is_worth_fetching(MB, 1.0) for _ in range(2 * RETRY_AFTER_SKIPPED + 2)]
    assert tried.count(True) == 2
    assert not any(WorkerLink().is_worth_fetching(100 * MB, OVERHEAD_S) for _ in range(RETRY_AFTER_SKIPPED + 2)), (
        "it cannot pay ever"
    )


def test_a_failing_link_is_tried_less_often_until_it_works() -> None:
    link = WorkerLink()
    assert link.allow_attempt()
    for failures in range(1, 20):
        link.record_failure()
        passed = 0
        while not link.allow_attempt():
            passed += 1
        assert passed == min(2**failures, MAX_SKIPPED)
    link.record_failure()
    link.observe(MB, 0.01)
    assert link.allow_attempt()
