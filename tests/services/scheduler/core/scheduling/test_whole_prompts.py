"""Encoder models without KV: prompts are computed whole, in one step, and hold no blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepResult
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.sequence import WorkerLoss
from quire.shared.kv.kv_specs import NOTHING
from tests.services.scheduler.conftest import make_limits, make_sequence

NO_TOKENS = np.zeros(0, dtype=np.int32)


def encoder(**fields: object) -> Core:
    sizes = {"num_blocks": 2, "max_model_len": 100, "max_num_batched_tokens": 100, "enable_prefix_caching": True}
    return Core(make_limits(kv_specs=(NOTHING,), **(sizes | fields)))


def read(core: Core, key: int, length: int, **fields: object) -> None:
    core.add(make_sequence(key, list(range(length)), 0, samples_nothing=True, **fields))


def step(core: Core) -> list[int]:
    """Runs the next step to its end; returns the keys of the sequences with vectors."""
    plan = core.schedule(0)
    assert plan is not None
    assert plan.num_tokens <= core.limits.max_num_batched_tokens
    assert len(plan.new_block_ids) == 0
    flight = core.steps_in_flight[0]
    core.apply(StepResult(plan.step_id, NO_TOKENS, pooled=dict.fromkeys(flight.pooled_keys, b"")), 0)
    events = core.take_events()
    assert [end.reason for end in events.finished] == [Reason.STOP] * len(events.pooled)
    return [pooled.sequence.key for pooled in events.pooled]


def test_prompts_beyond_the_budget_wait_for_the_next_step() -> None:
    core = encoder()
    for key, length in enumerate((40, 50, 30, 20, 60)):
        read(core, key, length)
    assert [step(core) for _ in range(3)] == [[0, 1], [2, 3], [4]]
    assert not core.has_work


def test_a_whole_prompt_is_not_chunked() -> None:
    core = encoder(long_prefill_token_threshold=16)
    read(core, 0, 10)
    read(core, 1, 90)
    assert step(core) == [0, 1]


def test_encoder_prompts_are_not_cached() -> None:
    core = encoder()
    read(core, 0, 64)
    step(core)
    read(core, 1, 64)
    plan = core.schedule(0)
    assert plan is not None
    assert [admission.num_cached_tokens for admission in plan.admitted] == [0]


@pytest.mark.parametrize(
    ("length", "fields", "text"),
    [
        (101, {}, "longer than the maximum model length of 100"),
        (90, {"max_num_batched_tokens": 80}, "exceeds the token budget of a step, 80"),
    ],
)
def test_a_prompt_longer_than_a_step_is_refused(length: int, fields: dict[str, object], text: str) -> None:
    core = encoder(**fields)
    read(core, 0, length)
    (finished,) = core.take_events().finished
    assert finished.failure is not None
    assert text in finished.failure.message


def test_generation_with_an_encoder_is_refused() -> None:
    core = encoder()
    core.add(make_sequence(0, [1, 2, 3], 5))
    (finished,) = core.take_events().finished
    assert finished.failure is not None
    assert "generates no text" in finished.failure.message


def test_prompts_of_a_lost_worker_are_computed_elsewhere() -> None:
    first, second = encoder(), encoder()
    for key in range(3):
        read(first, key, 60)
    first.schedule(0)
    for sequence in first.evacuate(WorkerLoss("w", 1)):
        second.add(sequence)
    assert [step(second) for _ in range(3)] == [[0], [1], [2]]


def test_random_operations_release_everything() -> None:
    """Prompts of all lengths, several steps in flight, and some cancellations."""
    numbers = random.Random(3)
    core = encoder(max_steps_in_flight=2, max_num_seqs=4)
    ended: set[int] = set()
    for key in range(400):
        read(core, key, numbers.randint(1, 100))
        for _ in range(numbers.randint(0, 3)):
            core.schedule(0)
        if numbers.random() < 0.2:
            core.cancel(numbers.randint(0, key))
        while core.steps_in_flight and numbers.random() < 0.8:
            flight = core.steps_in_flight[0]
            core.apply(StepResult(flight.step_id, NO_TOKENS, pooled=dict.fromkeys(flight.pooled_keys, b"")), 0)
        ended |= {end.sequence.key for end in core.take_events().finished}
    while core.has_work or core.steps_in_flight:
        core.schedule(0)
        flight = core.steps_in_flight[0]
        core.apply(StepResult(flight.step_id, NO_TOKENS, pooled=dict.fromkeys(flight.pooled_keys, b"")), 0)
        ended |= {end.sequence.key for end in core.take_events().finished}
    assert ended == set(range(400))
    assert core.kv.idle
    assert (core.running.max_blocks, core.num_waiting_tokens, core.kv.num_unowned()) == (0, 0, 0)
