"""Trend verdicts on series with known slopes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tools.bench.measuring.trend import FLAT, GROWS, UNCLEAR, Slope, slope

LOOKS = 252  # of half an hour, every 5 s, behind 30 %
EVERY_S = 5.0
LEAK = 0.01  # by a second; 12.6 over all looks


def alike(draw: random.Random, likeness: float) -> Iterator[float]:
    """Returns noise with correlated neighbours: 0: independent; towards 1: longer waves."""
    value = 0.0
    while True:
        value = likeness * value + draw.gauss(0, 1)
        yield value


def with_peaks(draw: random.Random) -> Iterator[float]:
    while True:
        yield draw.gauss(0, 1) + (1000 if draw.random() < 0.05 else 0)


def with_levels(draw: random.Random) -> Iterator[float]:
    """Returns a series like memory use: constant for minutes, then another level."""
    level = 0.0
    while True:
        level = draw.gauss(0, 3) if draw.random() < 0.01 else level
        yield level


NOISES = {
    "white": lambda draw: alike(draw, 0),
    "alike": lambda draw: alike(draw, 0.5),
    "much alike": lambda draw: alike(draw, 0.9),
    "peaks": with_peaks,
    "levels": with_levels,
}


def measured(noise: str, seed: int, leak: float) -> Slope:
    found = slope([(EVERY_S * at, value + leak * EVERY_S * at) for at, value in _numbered(noise, seed)])
    assert found is not None
    return found


def _numbered(noise: str, seed: int) -> Iterator[tuple[int, float]]:
    return zip(range(LOOKS), NOISES[noise](random.Random(seed)), strict=False)


@pytest.mark.parametrize("noise", NOISES)
def test_what_does_not_grow_is_hardly_ever_said_to(noise: str) -> None:
    """A 95 % interval lies above 0 in 2.5 % of all cases; up to 10 % with long correlations."""
    grown = sum(measured(noise, seed, 0).verdict(1) == GROWS for seed in range(100))
    assert grown <= (10 if noise == "much alike" else 5)


@pytest.mark.parametrize("noise", NOISES)
def test_a_leak_beneath_the_noise_is_found_and_measured(noise: str) -> None:
    found = [measured(noise, seed, LEAK) for seed in range(100)]
    assert sum(one.verdict(1) == GROWS for one in found) >= 95
    assert sum(one.low <= LEAK <= one.high for one in found) >= 80
    assert sorted(one.value for one in found)[50] == pytest.approx(LEAK, rel=0.05)


def test_a_straight_line_has_its_slope_and_no_doubt() -> None:
    line = slope([(at, 3.0 * at + 5) for at in range(100)])
    assert line is not None
    assert (line.value, line.low, line.high) == pytest.approx((3, 3, 3))
    assert line.verdict(1000) == GROWS, "however small the bound would let it be"


def test_what_never_changes_is_flat_without_a_doubt() -> None:
    assert slope([(at, 7.0) for at in range(100)]) == Slope(0, 0, 0)
    assert Slope(0, 0, 0).verdict(0) == FLAT


def test_one_step_is_no_slope() -> None:
    """A single step, such as a late thread or a new arena, is not growth."""
    step = slope([(at, 17.0 + (at >= 50)) for at in range(100)])
    assert step is not None
    assert step.low <= 0


def test_a_cache_that_has_filled_up_before_the_first_look_is_flat() -> None:
    filled = slope([(at, 0.5 * (at % 3)) for at in range(100)])
    assert filled is not None
    assert filled.verdict(0.1) == FLAT


def test_one_that_is_still_filling_up_grows() -> None:
    filling = slope([(at, 100.0 * (1 - 0.98**at)) for at in range(100)])
    assert filling is not None
    assert filling.verdict(1) == GROWS


def test_what_shrinks_is_flat_and_what_cannot_be_told_is_said_so() -> None:
    assert Slope(-2, -3, -1).verdict(0.5) == FLAT
    assert Slope(0.1, -1, 1).verdict(0.5) == UNCLEAR
    assert Slope(0.1, -1, 1).verdict(1) == FLAT
    assert Slope(0.1, 0.01, 0.2).verdict(1) == GROWS


def test_too_few_looks_have_no_slope() -> None:
    assert slope([(0.0, 1.0)] * 5) is None
    assert slope([]) is None


def test_another_unit_is_another_number_for_the_same() -> None:
    assert Slope(1, 0.5, 2).times(3600) == Slope(3600, 1800, 7200)
