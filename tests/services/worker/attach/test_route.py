"""Choice of the scheduler when it is away or redirects the worker."""

from __future__ import annotations

from quire.services.worker.attach.route import MAX_FAILURES, Route


def test_it_waits_for_its_scheduler_before_it_tries_others() -> None:
    route = Route(["a:1"])
    route.record_welcome(["b:1", "c:1"])
    visited = []
    for _ in range(MAX_FAILURES + 3):
        visited.append(route.address)
        route.record_failure()
    assert visited == ["a:1"] * MAX_FAILURES + ["b:1", "c:1", "a:1"]


def test_redirect_is_followed_and_reported_once() -> None:
    route = Route(["a:1"])
    route.record_welcome(["b:1"])
    route.redirect("b:1")
    assert (route.address, route.redirected) == ("b:1", True)
    route.record_failure()
    assert (route.address, route.redirected) == ("b:1", False)
    route.record_welcome(["a:1"])
    assert (route.address, route.redirected) == ("b:1", False)


def test_single_scheduler_is_retried_forever() -> None:
    route = Route(["a:1"])
    for _ in range(20):
        route.record_failure()
    assert route.address == "a:1"
