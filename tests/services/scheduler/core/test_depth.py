"""As many steps are under way as it takes to keep the worker busy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from services.scheduler.core.core import Core
from services.scheduler.core.plan import StepResult
from tests.services.scheduler.conftest import make_sequence


def steps_under_way(core: Core, step_s: float) -> int:
    """After some steps of that length; the loop that plans has nothing else to do."""
    now = 0.0
    core.add(make_sequence(0, list(range(10)), max_tokens=200))
    for _ in range(30):
        while core.schedule(now) is not None:
            pass
        now += step_s
        core.apply(StepResult(core.flights[0].step_id, np.full(len(core.flights[0].slots), 5, np.int32)), now)
    while core.schedule(now) is not None:
        pass
    return len(core.flights)


@pytest.mark.parametrize(("step_s", "number"), [(0.0005, 3), (0.0012, 3), (0.002, 2), (0.05, 2)])
def test_short_steps_come_in_threes(core: Callable[..., Core], step_s: float, number: int) -> None:
    assert steps_under_way(core(max_steps_in_flight=0), step_s) == number


@pytest.mark.parametrize("fixed", [1, 2, 4])
def test_a_number_that_was_asked_for_is_kept(core: Callable[..., Core], fixed: int) -> None:
    assert steps_under_way(core(max_steps_in_flight=fixed), 0.0005) == fixed
    assert steps_under_way(core(max_steps_in_flight=fixed), 0.05) == fixed


def test_it_follows_the_steps(core: Callable[..., Core]) -> None:
    c = core(max_steps_in_flight=0)
    for seconds, most in ((0.0005, 3), (0.01, 2), (0.0005, 3)):
        for _ in range(30):
            c.depth.learn(seconds)
        assert c.depth.most == most
