"""Steps are in flight as many and as early as necessary to keep the worker busy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepResult
from tests.services.scheduler.conftest import make_sequence


def plan_all(core: Core, now: float) -> None:
    while core.schedule(now) is not None:
        pass


def run(core: Core, step_s: float, now: float = 0.0) -> float:
    """Runs some steps of that length, with an otherwise idle event loop. Returns the time after them."""
    for _ in range(30):
        plan_all(core, now)
        plan_all(core, now + 0.9 * step_s)
        now += step_s
        apply(core, now)
    return now


def apply(core: Core, now: float) -> None:
    flight = core.steps_in_flight[0]
    core.apply(StepResult(flight.step_id, np.full(len(flight.slots), 5, np.int32)), now)


def steps_under_way(core: Core, step_s: float) -> int:
    core.add(make_sequence(0, list(range(10)), max_tokens=200))
    now = run(core, step_s)
    plan_all(core, now)
    plan_all(core, now + 0.9 * step_s)
    return len(core.steps_in_flight)


@pytest.mark.parametrize(("step_s", "number"), [(0.0005, 3), (0.0012, 3), (0.002, 2), (0.05, 2)])
def test_three_short_steps_are_in_flight(core: Callable[..., Core], step_s: float, number: int) -> None:
    assert steps_under_way(core(max_steps_in_flight=0), step_s) == number


@pytest.mark.parametrize("fixed", [1, 2, 4])
def test_a_fixed_depth_is_kept(core: Callable[..., Core], fixed: int) -> None:
    assert steps_under_way(core(max_steps_in_flight=fixed), 0.0005) == fixed
    assert steps_under_way(core(max_steps_in_flight=fixed), 0.05) == fixed


def test_the_depth_follows_the_step_time(core: Callable[..., Core]) -> None:
    c = core(max_steps_in_flight=0)
    for seconds, most in ((0.0005, 3), (0.01, 2), (0.0005, 3)):
        for _ in range(30):
            c.depth.observe(seconds)
        assert c.depth.max_steps == most


@pytest.mark.parametrize(("step_s", "planned_after"), [(0.1, 0.08), (0.025, 0.005)])
def test_sequences_arriving_during_a_long_step_are_in_the_next(
    core: Callable[..., Core], step_s: float, planned_after: float
) -> None:
    c = core(max_steps_in_flight=0)
    c.add(make_sequence(0, list(range(10)), max_tokens=200))
    now = run(c, step_s)
    plan_all(c, now)
    assert len(c.steps_in_flight) == 1
    assert c.next_at == pytest.approx(now + planned_after, abs=1e-4)
    c.add(make_sequence(1, list(range(10)), max_tokens=200))
    assert c.schedule(c.next_at - 1e-6) is None
    plan = c.schedule(c.next_at)
    assert plan is not None
    assert plan.admitted


def test_the_step_after_a_short_one_is_planned_at_once(core: Callable[..., Core]) -> None:
    c = core(max_steps_in_flight=0)
    c.add(make_sequence(0, list(range(10)), max_tokens=200))
    plan_all(c, run(c, 0.015))
    assert len(c.steps_in_flight) == 2


def test_a_step_of_unknown_duration_is_not_waited_for(core: Callable[..., Core]) -> None:
    c = core(max_steps_in_flight=0, max_num_batched_tokens=2000, num_blocks=500)
    c.add(make_sequence(0, list(range(10)), max_tokens=200))
    now = run(c, 0.1)
    plan_all(c, now)
    plan_all(c, now + 0.09)
    c.add(make_sequence(1, list(range(1000)), max_tokens=200))
    apply(c, now + 0.1)
    plan_all(c, now + 0.1)
    plan_all(c, now + 0.19)
    apply(c, now + 0.2)  # the step with the prompt begins
    plan_all(c, now + 0.2)
    assert len(c.steps_in_flight) == 2
