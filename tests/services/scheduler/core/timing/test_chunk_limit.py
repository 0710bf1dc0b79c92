"""Long prompts do not delay streams beyond the setting, and still progress."""

from __future__ import annotations

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepResult
from quire.services.scheduler.core.timing.step_times import MIN_TOKENS, ChunkLimit
from tests.services.scheduler.conftest import make_sequence
from tests.services.scheduler.core.steps import NewCore

PER_TOKEN_S, LATER_S, BASE_S = 20e-6, 5e-9, 0.006  # of a prompt's token, more for each before it; of any step


def gaps(core: Core, prompt: int, base_s: float = BASE_S) -> list[float]:
    """Returns the gaps of a stream while a prompt is computed, on a worker whose step time is proportional to the
    computed tokens."""
    core.add(make_sequence(0, list(range(10)), max_tokens=2000))
    now, done, times = 0.0, 0, []
    for step in range(1500):
        if step == 20:
            core.add(make_sequence(1, list(range(prompt)), max_tokens=5))
        assert core.schedule(now) is not None
        flight = core.steps_in_flight[0]
        took = base_s + flight.num_prompt_tokens * (PER_TOKEN_S + done * LATER_S)
        if step >= 20 and flight.num_prompt_tokens:
            done += flight.num_prompt_tokens
            times.append(took)
        now += took
        core.apply(StepResult(flight.step_id, np.full(len(flight.slots), 5, np.int32)), now)
        if done >= prompt:
            return times
    raise AssertionError("the prompt was never computed")


SIZES = {"num_blocks": 9000, "max_num_batched_tokens": 8192, "max_model_len": 131_072, "max_steps_in_flight": 1}


def test_stream_gaps_stay_below_the_setting(core: NewCore) -> None:
    limited = sorted(gaps(core(longest_stream_gap_s=0.05, **SIZES), 120_000))
    assert limited[int(0.99 * len(limited))] <= 0.05
    assert sum(limited) / len(limited) > 0.035, "and steps are not much smaller than they may be"
    assert max(gaps(core(**SIZES), 120_000)) > 0.5, "without the limit"


def test_a_prompt_alone_uses_the_whole_step(core: NewCore) -> None:
    alone = core(longest_stream_gap_s=0.05, **SIZES)
    alone.add(make_sequence(0, list(range(20_000)), max_tokens=5))
    plan = alone.schedule(0.0)
    assert plan is not None
    assert plan.num_tokens == 8192


def test_prompts_progress_where_streams_alone_exceed_the_gap(core: NewCore) -> None:
    assert len(gaps(core(longest_stream_gap_s=0.05, **SIZES), 4000, base_s=0.06)) <= 4000 / MIN_TOKENS


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 5.0])
def test_abnormal_step_times_leave_a_valid_limit(seconds: float) -> None:
    limit = ChunkLimit(0.05, 2048)
    for _ in range(50):
        limit.observe(100, 0, seconds)
        limit.observe(0, 5, seconds)
        limit.observe(100, 5, seconds)
        assert MIN_TOKENS <= limit.num_tokens <= 2048
