"""Results of steps: tokens, end reasons, log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from quire.services.scheduler.core.plan import Logprobs, StepResult
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from tests.services.scheduler.conftest import make_sequence
from tests.services.scheduler.core.steps import EOS, NewCore, add, returned


@pytest.mark.parametrize(
    ("fields", "returns", "reason", "stop_token", "outputs"),
    [
        ({"eos_token_ids": (EOS,)}, [EOS], Reason.STOP, None, [EOS]),
        ({"stop_token_ids": (42, 43)}, [10, 42, 12], Reason.STOP, 42, [10, 42]),
        ({"max_tokens": 2}, [10, 11, 12], Reason.LENGTH, None, [10, 11]),
        ({"stop_token_ids": (7, 8, 9, 43, 44)}, [44], Reason.STOP, 44, [44]),
    ],
)
def test_s12_end_conditions_of_a_sequence(
    core: NewCore,
    fields: dict[str, object],
    returns: list[int],
    reason: Reason,
    stop_token: int | None,
    outputs: list[int],
) -> None:
    c = core()
    add(c, 10, **fields)
    got: list[int] = []
    for token in returns:
        if c.schedule(0) is None:
            break
        returned(c, token)
        got += c.state.events.tokens.pop().token_ids.tolist()
    events = c.take_events()
    assert [(f.reason, f.stop_token_id) for f in events.finished] == [(reason, stop_token)]
    assert got == outputs
    assert c.use.used == 0


def test_s12_an_end_token_that_is_ignored_does_not_end(core: NewCore) -> None:
    c = core()
    add(c, 10)  # ignore_eos: the frontend sends no end tokens
    c.schedule(0)
    returned(c, EOS)
    assert not c.take_events().finished


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_s20_no_step_is_planned_past_a_certain_end(core: NewCore, max_tokens: int, in_flight: int) -> None:
    c = core(max_steps_in_flight=in_flight)
    add(c, *[10] * 4, max_tokens=max_tokens)
    while c.has_work:
        while c.schedule(0) is not None:
            pass
        returned(c, *[5] * len(c.steps_in_flight[0].slots))
    assert c.counts.scheduled_tokens == 4 * (10 + max_tokens - 1)


def test_a_preempted_sequence_can_end_with_its_token_in_flight(core: NewCore) -> None:
    c = core()
    add(c, 10, stop_token_ids=(42,))
    c.schedule(0)
    c.preempt(0)
    returned(c, 42)
    events = c.take_events()
    assert [(f.reason, f.stop_token_id) for f in events.finished] == [(Reason.STOP, 42)]
    assert not c.has_work


def test_a_failed_slot_ends_only_its_sequence(core: NewCore) -> None:
    c = core()
    add(c, 10, 10)
    c.schedule(0)
    failure = Failure("INTERNAL", "not a number")
    c.apply(StepResult(1, np.array([-1, 5], dtype=np.int32), failures=[(0, failure)]), now=0)
    events = c.take_events()
    assert [(f.sequence.key, f.failure) for f in events.finished] == [(0, failure)]
    assert events.tokens[0].sequence_ids.tolist() == [1]


def test_logprobs_are_emitted_for_running_sequences_that_asked(core: NewCore) -> None:
    c = core()
    for key, asks in enumerate([True, False, True]):
        c.add(make_sequence(key, [key] * 10, asks_logprobs=asks))
    c.schedule(0)
    c.cancel(0)
    entries = Logprobs(
        np.array([2, 3], dtype=np.uint32),
        np.array([1, 2, 3, 4, 5], dtype=np.int32),
        np.array([-1, -2, -3, -4, -5], dtype=np.float32),
        np.array([1, 9], dtype=np.uint32),
    )
    c.apply(StepResult(1, np.array([1, 2, 3], dtype=np.int32), logprobs=entries), now=0)
    columns = c.take_events().tokens[0].logprobs
    assert columns is not None
    assert columns.sequence_ids.tolist() == [2]
    assert columns.entries.token_ids.tolist() == [3, 4, 5]
    assert columns.entries.ranks.tolist() == [9]


def test_a_late_token_has_its_logprobs(core: NewCore) -> None:
    c = core()
    add(c, 10, asks_logprobs=True)
    c.schedule(0)
    c.preempt(0)
    entries = Logprobs(
        np.array([1], dtype=np.uint32),
        np.array([7], dtype=np.int32),
        np.array([-1], dtype=np.float32),
        np.array([1], dtype=np.uint32),
    )
    c.apply(StepResult(1, np.array([7], dtype=np.int32), logprobs=entries), now=0)
    columns = c.take_events().tokens[0].logprobs
    assert columns is not None
    assert columns.entries.token_ids.tolist() == [7]
