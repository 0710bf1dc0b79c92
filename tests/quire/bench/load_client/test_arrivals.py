"""Arrival times of requests, and limits of requests in flight."""

from __future__ import annotations

import pytest

from quire.bench.load_client import arrivals
from quire.shared.errors import InvalidArgument


def test_poisson_arrivals_come_at_their_rate_and_always_the_same() -> None:
    offsets = arrivals.parse("20/s").offsets_s(2000)
    assert offsets == sorted(offsets)
    assert 2000 / offsets[-1] == pytest.approx(20, rel=0.05)
    assert offsets == arrivals.parse("20/s").offsets_s(2000)


def test_a_limit_is_shared_between_clients_to_the_last_request() -> None:
    arrival = arrivals.parse("10")
    assert [arrival.share(i, 4) for i in range(4)] == [3, 3, 2, 2]
    assert arrival.most_clients(16) == 10
    assert arrival.offsets_s(2) == [0, 0]


def test_a_burst_has_no_limit() -> None:
    arrival = arrivals.parse("burst")
    assert (arrival.share(0, 3), arrival.most_clients(16)) == (0, 16)


@pytest.mark.parametrize("text", ["", "0", "-1", "0/s", "fast", "1.5"])
def test_nonsense_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(InvalidArgument, match="burst, N"):
        arrivals.parse(text)
