"""Percentiles are exact, and rates count what succeeded."""

from __future__ import annotations

import math
from array import array

import pytest

from quire.bench import load
from quire.bench.load_client.timing import LoadResult, RequestTiming
from quire.bench.measuring.percentiles import percentile, spread_ms


@pytest.mark.parametrize(
    ("count", "share", "rank"),
    [(100, 0.5, 50), (100, 0.99, 99), (100, 1.0, 100), (1, 0.99, 1), (3, 0.5, 2), (4, 0.5, 2), (10, 0.9, 9)],
)
def test_a_percentile_is_a_measured_value(count: int, share: float, rank: int) -> None:
    assert percentile(list(range(1, count + 1)), share) == rank


def test_nothing_measured_is_nothing_said() -> None:
    assert math.isnan(percentile([], 0.5))
    assert spread_ms("ttft", [], (0.5,)) == {}
    assert spread_ms("ttft", [0.002, 0.001], (0.5, 0.999, 1)) == {
        "ttft_p50_ms": 1.0,
        "ttft_p99.9_ms": 2.0,
        "ttft_max_ms": 2.0,
    }


def outcome() -> LoadResult:
    """Two streams that start at 10 s, and a request that failed."""
    first = RequestTiming(10.0, array("d", [10.1, 10.2, 10.4]), 4, 10.5)
    second = RequestTiming(10.0, array("d", [10.3]), 1, 12.0)
    return LoadResult(10.0, 30, [first, second, RequestTiming(10.0, ended=10.0, error="refused")], [0.25, 0.5])


def test_rates_are_over_the_whole_time_and_of_what_succeeded() -> None:
    rates = outcome().rates()
    assert rates == pytest.approx(
        {
            "out_tok_s": 2.5,
            "prompt_tok_s": 15,
            "total_tok_s": 17.5,
            "req_s": 1,
            "wall_s": 2,
            "errors": 1,
            "client_cpu": 0.5,
        }
    )


def test_the_rate_of_a_full_load_leaves_out_its_end() -> None:
    assert outcome().full_rate(1) == pytest.approx(2.5)  # to the end
    two = outcome().full_rate(2)  # until 10.5: the first stream has ended, the second has had its token
    assert two == pytest.approx(5 / 0.5)
    assert outcome().full_rate(3) == pytest.approx(two)  # requests that failed do not count
    late = RequestTiming(10.0, array("d", [10.1, 10.2, 11.0, 11.5]), 8, 12.0)
    assert LoadResult(10.0, 0, [outcome().timings[0], late], [0.1]).full_rate(2) == pytest.approx((4 + 4) / 0.5)


def test_latencies_are_of_messages_and_of_tokens() -> None:
    latencies = outcome().latencies()
    assert latencies["ttft_p50_ms"] == pytest.approx(100)
    assert latencies["ttft_p99_ms"] == pytest.approx(300)
    assert latencies["itl_p99_ms"] == pytest.approx(200)
    assert latencies["tpot_p50_ms"] == pytest.approx(100)  # 300 ms for the three tokens behind the first
    assert latencies["e2e_p99_ms"] == pytest.approx(2000)
    assert latencies["tok_per_message"] == pytest.approx(5 / 4)


def test_medians_are_of_the_runs_that_have_a_measure() -> None:
    assert load.medians([{"a": 1, "b": 5}, {"a": 3}, {"a": 2}]) == {"a": 2, "b": 5, "runs": 3}
