"""When KV is fetched and when it is computed."""

from __future__ import annotations

from quire.services.scheduler.replicas.worker_links import (
    FIRST_BYTES_PER_S,
    MOST_PASSED,
    OVERHEAD_S,
    TRIED_AGAIN_AFTER,
    WorkerLink,
)

MB = 1_000_000


def test_the_rate_is_what_was_measured() -> None:
    link = WorkerLink()
    assert link.bytes_per_s == FIRST_BYTES_PER_S
    for _ in range(3):
        link.learn(100 * MB, 0.1)
    assert round(link.bytes_per_s / MB) == 1000
    link.learn(0, 1.0)
    link.learn(MB, 0.0)
    assert round(link.bytes_per_s / MB) == 1000, "neither says anything"
    link.learn(100 * MB, 1.0)
    assert 200 < link.bytes_per_s / MB < 400


def test_what_takes_longer_to_compute_is_fetched() -> None:
    link = WorkerLink()
    fetch_s = link.seconds_for(20 * MB)
    assert link.pays(20 * MB, fetch_s * 1.01)
    assert not link.pays(20 * MB, fetch_s * 0.99)
    assert not link.pays(1, OVERHEAD_S), "a few tokens are computed"


def test_nothing_is_fetched_while_nobody_knows_what_computing_takes() -> None:
    assert not any(WorkerLink().pays(1, 0.0) for _ in range(TRIED_AGAIN_AFTER + 2))


def test_a_link_that_was_slow_is_tried_again() -> None:
    link = WorkerLink()
    link.learn(MB, 10.0)
    tried = [link.pays(MB, 1.0) for _ in range(2 * TRIED_AGAIN_AFTER + 2)]
    assert tried.count(True) == 2
    assert not any(WorkerLink().pays(100 * MB, OVERHEAD_S) for _ in range(TRIED_AGAIN_AFTER + 2)), "it cannot pay ever"


def test_a_link_that_fails_is_tried_less_and_less_and_as_before_once_it_works() -> None:
    link = WorkerLink()
    assert link.may_try()
    for failures in range(1, 20):
        link.failed()
        passed = 0
        while not link.may_try():
            passed += 1
        assert passed == min(2**failures, MOST_PASSED)
    link.failed()
    link.learn(MB, 0.01)
    assert link.may_try()
