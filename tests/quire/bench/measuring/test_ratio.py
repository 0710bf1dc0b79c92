"""Comparing sides on a machine that changes its speed."""

from __future__ import annotations

import random

import pytest

from quire.bench.measuring.ratio import ratio_of_rounds


def turns(rounds: int, speeds: dict[str, float], pace: list[float]) -> dict[str, list[float]]:
    """Returns the results of sides of those speeds that take turns forwards and backwards while the machine's speed
    changes."""
    found: dict[str, list[float]] = {name: [] for name in speeds}
    moments = iter(pace)
    for number in range(rounds):
        for name in speeds if number % 2 == 0 else reversed(speeds):
            found[name].append(speeds[name] * next(moments))
    return found


def test_a_machine_that_gets_slower_all_the_time_does_not_show():
    found = turns(8, {"off": 100.0, "other": 90.0, "ours": 98.0}, [0.99**moment for moment in range(24)])
    ratio = ratio_of_rounds(found["ours"], found["off"])
    assert ratio.value == pytest.approx(0.98)
    assert ratio.error == pytest.approx(0.0, abs=1e-9)


def test_the_error_says_how_far_off_the_value_is():
    dice = random.Random(7)
    within = 0
    for _ in range(400):
        pace = [dice.lognormvariate(0.0, 0.05) for _ in range(40)]
        found = turns(20, {"off": 1.0, "ours": 0.9}, pace)
        ratio = ratio_of_rounds(found["ours"], found["off"])
        assert ratio.error is not None
        within += abs(ratio.value - 0.9) < 2 * ratio.error
    assert 0.88 < within / 400 < 0.98  # of two standard deviations, estimated from ten pairs


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_few_runs_tell_no_error(rounds: int):
    assert ratio_of_rounds([2.0] * rounds, [1.0] * rounds) == (pytest.approx(2.0), None)
