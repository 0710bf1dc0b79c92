"""Scheduling policies: order of admission, preemption victims and fairness between tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepResult
from quire.services.scheduler.core.policies import PolicyOptions, fair
from quire.services.scheduler.core.policies.fair import Fair
from quire.services.scheduler.core.policies.priority import Priority
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.repetition import RepetitionRule
from quire.services.scheduler.sessions.scheduling_policies import find_policy
from quire.shared.errors import InvalidArgument
from tests.services.scheduler.conftest import UnlimitedForecast, count_operations, make_sequence

NewCore = Callable[..., Core]


def step(core: Core, now: float = 0.0, token: int = 5) -> None:
    """Plans and applies one step."""
    assert core.schedule(now) is not None
    flight = core.steps_in_flight[0]
    core.apply(StepResult(flight.step_id, np.full(len(flight.slots), token, dtype=np.int32)), now)


def waiting(core: Core) -> list[int]:
    return [sequence.key for sequence in core.waiting]


def running(core: Core) -> set[int]:
    return {sequence.key for sequence in core.running.sequences if sequence is not None}


@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        ([2, 0, 1], [1, 2, 3], [1, 2, 0]),
        ([1, 1, 1], [3, 1, 2], [1, 2, 0]),
        ([2, 1, 1, 0], [1, 3, 2, 4], [3, 2, 1, 0]),
        ([1, 1, 1, 1], [4, 1, 3, 2], [1, 3, 2, 0]),
    ],
)
def test_s14_priority_then_arrival(core: NewCore, priorities: list[int], arrivals: list[int], order: list[int]) -> None:
    c = core(policy=Priority)
    for key, (priority, arrival) in enumerate(zip(priorities, arrivals, strict=True)):
        c.add(make_sequence(key, [1] * 10, priority=priority, arrival=float(arrival)))
    assert waiting(c) == order
    plan = c.schedule(0)
    assert plan is not None
    assert [admission.sequence.key for admission in plan.admitted] == order


@pytest.mark.parametrize(
    ("slots", "priorities", "runs", "waits"), [(1, [3, 2, 0], {2}, [1, 0]), (2, [3, 1, 2, 0], {3, 1}, [2, 0])]
)
def test_s14_the_most_urgent_get_the_slots(
    core: NewCore, slots: int, priorities: list[int], runs: set[int], waits: list[int]
) -> None:
    c = core(policy=Priority, max_num_seqs=slots)
    for key, priority in enumerate(priorities):
        c.add(make_sequence(key, [1] * 10, priority=priority))
    c.schedule(0)
    assert running(c) == runs
    assert waiting(c) == waits


def test_under_priority_the_least_urgent_is_preempted_even_if_it_is_old(core: NewCore) -> None:
    c = core(policy=Priority, num_blocks=5, max_model_len=64)
    c.state.forecast = UnlimitedForecast()
    c.add(make_sequence(0, [1] * 16, 40, priority=5))
    c.add(make_sequence(1, [2] * 16, 40, priority=1))
    for _ in range(17):
        step(c)
    assert c.use.free == 0
    step(c)
    assert running(c) == {1}
    assert waiting(c) == [0]


def steps_until_it_runs(c: Core, key: int, at_most: int = 400) -> int:
    for steps in range(at_most):
        if key in running(c):
            return steps
        step(c)
    return at_most


def busy_with_priority_9(core: NewCore, **limits: object) -> Core:
    """Returns a core with 31 sequences that are expected to need all blocks later; most are free now."""
    c = core(policy=Priority, num_blocks=1001, max_num_seqs=64, max_model_len=4096, **limits)
    for key in range(31):
        c.add(make_sequence(key, [key] * 100, 2000, priority=9, arrival=float(key)))
    step(c)
    return c


def test_an_urgent_sequence_needs_no_room_for_growth_of_less_urgent_ones(core: NewCore) -> None:
    c = busy_with_priority_9(core)
    for _ in range(20):
        step(c, now=40.0)
    assert c.use.free > 700
    c.add(make_sequence(100, [7] * 100, 2000, priority=0, arrival=40.0))
    assert steps_until_it_runs(c, 100) <= 1


def test_an_equally_urgent_sequence_waits_for_room_to_grow(core: NewCore) -> None:
    c = busy_with_priority_9(core)
    assert len(running(c)) < 31
    c.add(make_sequence(100, [7] * 100, 2000, priority=9, arrival=-1.0))  # the first of the queue
    assert waiting(c)[0] == 100
    assert steps_until_it_runs(c, 100, at_most=20) == 20
    assert c.use.free > 500


def test_aged_sequences_precede_more_urgent_new_ones(core: NewCore) -> None:
    """One level per 10 s: 50 s of waiting outweigh 5 levels."""
    for aging, expected in ((0.0, [2, 1, 0]), (10.0, [1, 0, 2])):
        c = core(policy=Priority, policy_options=PolicyOptions(priority_aging_s=aging))
        c.add(make_sequence(0, [1] * 10, priority=5, arrival=0.0))
        c.add(make_sequence(1, [1] * 10, priority=1, arrival=39.0))
        c.add(make_sequence(2, [1] * 10, priority=0, arrival=51.0))
        assert waiting(c) == expected


def test_aging_prevents_starvation_by_urgent_sequences(core: NewCore) -> None:
    ran_after = {}
    for aging in (0.0, 2.0):
        c = core(policy=Priority, policy_options=PolicyOptions(priority_aging_s=aging), max_num_seqs=1)
        c.add(make_sequence(0, [1] * 10, 1, priority=3, arrival=0.0))
        for second in range(40):
            c.add(make_sequence(1 + second, [1] * 10, 1, priority=0, arrival=float(second)))
            step(c, now=float(second))
            if any(f.sequence.key == 0 for f in c.take_events().finished):
                ran_after[aging] = second
                break
    assert ran_after == {2.0: 6}


def test_a_cancelled_sequence_leaves_the_priority_queue(core: NewCore) -> None:
    c = core(policy=Priority, max_num_seqs=1)
    for key in range(3):
        c.add(make_sequence(key, [1] * 10, priority=key))
    c.cancel(0)
    c.schedule(0)
    assert running(c) == {1}


def served(core: Core, weights: dict[str, float]) -> dict[str, float]:
    return {tenant: core.waiting.counter(tenant) for tenant in weights}  # type: ignore[attr-defined]


@pytest.mark.parametrize("weights", [{"big": 1.0, "small": 1.0}, {"big": 2.0, "small": 1.0}])
def test_tenants_that_both_wait_get_equal_shares_within_the_bound(core: NewCore, weights: dict[str, float]) -> None:
    """One tenant floods the cluster with long prompts and answers before the other one sends short ones."""
    limits = {"num_blocks": 65, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 400}
    c = core(policy=Fair, policy_options=PolicyOptions(tenant_weights=weights), **limits)
    sizes = {"big": (200, 60), "small": (20, 10)}
    for key in range(400):
        tenant = "big" if key < 60 else "small"
        prompt, answer = sizes[tenant]
        c.add(make_sequence(key, [key] * prompt, answer, tenant=tenant))
    bound = 2 * max(200, 64 * 16) / min(weights.values())
    steps = 0
    while all(any(s.tenant == tenant for s in c.waiting) for tenant in weights):
        step(c)
        steps += 1
        counters = served(c, weights)
        assert abs(counters["big"] - counters["small"]) <= bound
    assert steps > 100, "both were backlogged for long enough to tell"
    got = {tenant: value * weights[tenant] for tenant, value in served(c, weights).items()}
    assert got["big"] / got["small"] == pytest.approx(weights["big"] / weights["small"], rel=0.15)


def test_an_idle_tenant_gains_no_credit(core: NewCore) -> None:
    c = core(policy=Fair, max_num_seqs=1)
    for key in range(20):
        c.add(make_sequence(key, [key] * 50, 10, tenant="busy"))
    for _ in range(60):
        step(c)
    for key in range(20, 40):
        c.add(make_sequence(key, [key] * 50, 10, tenant="late"))
    admitted: Counter[str] = Counter()
    for _ in range(120):
        plan = c.schedule(0)
        assert plan is not None
        admitted.update(admission.sequence.tenant for admission in plan.admitted)
        flight = c.steps_in_flight[0]
        c.apply(StepResult(flight.step_id, np.full(len(flight.slots), 5, dtype=np.int32)), 0)
    assert abs(admitted["busy"] - admitted["late"]) <= 2


def test_cached_prompts_cost_nothing(core: NewCore) -> None:
    c = core(policy=Fair, enable_prefix_caching=True)
    c.add(make_sequence(0, list(range(64)), 1, tenant="a"))
    step(c)
    c.add(make_sequence(1, list(range(64)), 1, tenant="b"))
    step(c)
    counters = served(c, {"a": 1, "b": 1})
    assert counters["a"] == 65
    assert counters["b"] == 65 + 1, "lifted to what was served last, then one output token"


def test_the_victim_belongs_to_the_tenant_that_was_served_most(core: NewCore) -> None:
    c = core(policy=Fair, num_blocks=9, max_model_len=128)
    c.state.forecast = UnlimitedForecast()
    c.add(make_sequence(0, [0] * 32, 60, tenant="modest"))
    c.add(make_sequence(1, [1] * 32, 60, tenant="greedy"))
    c.add(make_sequence(2, [2] * 32, 60, tenant="greedy"))
    while c.counts.preemptions == 0:
        step(c)
    assert 0 in running(c)
    assert {s.tenant for s in c.waiting} == {"greedy"}


def test_idle_tenants_beyond_the_limit_are_removed(core: NewCore) -> None:
    c = core(policy=lambda *options: Fair(*options, max_remembered=3))
    for key in range(10):
        c.add(make_sequence(key, [1] * 10, 2, tenant=f"t{key}"))
        step(c)
    while c.has_work:
        step(c)
    assert len(c.waiting.tenants) <= 4  # type: ignore[attr-defined]


def add_of(core: Core, tenant: str, first_key: int, count: int) -> None:
    for key in range(first_key, first_key + count):
        core.add(make_sequence(key, [key] * 4, max_tokens=50, tenant=tenant))


def test_the_last_slots_are_kept_for_tenants_with_few_sequences(core: NewCore) -> None:
    """A call with as many prompts as slots made the next first token of another tenant wait for an end."""
    c = core(policy=Fair, max_num_seqs=64)
    add_of(c, "short", 0, 1)
    step(c)
    add_of(c, "many", 100, 128)
    step(c)
    step(c)
    assert len(running(c)) == 60
    add_of(c, "short", 1, 3)  # the tenant's second to fourth
    step(c)
    assert {0, 1} <= running(c)
    assert running(c) & {2, 3} == set()
    assert len(running(c)) == 61


def test_a_waiting_tenant_above_its_share_is_passed_over_and_returns(core: NewCore) -> None:
    c = core(policy=Fair, max_num_seqs=32)
    add_of(c, "short", 0, 1)
    add_of(c, "many", 100, 64)
    for _ in range(3):
        step(c)
    before = running(c)
    add_of(c, "new", 200, 1)  # gets the rank of the tenant that waits, behind it
    step(c)
    assert running(c) == before | {200}
    for _ in range(60):
        step(c)
    assert len(running(c)) == 30
    assert all(key >= 100 for key in running(c))


def test_a_tenant_alone_takes_all_slots(core: NewCore) -> None:
    c = core(policy=Fair, max_num_seqs=32)
    add_of(c, "many", 0, 64)
    step(c)
    assert len(running(c)) == 32


def test_many_tenants_divide_the_reserved_slots(core: NewCore) -> None:
    """Names come from clients: a client with many of them takes no more than its tenants' shares."""
    c = core(policy=Fair, max_num_seqs=64)
    for number in range(30):
        add_of(c, f"t{number}", 100 * number, 4)
    step(c)
    assert len(running(c)) == 60
    add_of(c, "new", 5000, 2)
    step(c)
    assert 5000 in running(c)
    assert 5001 not in running(c)


def operations_to_admit(core: NewCore, num_tenants: int) -> int:
    """Counts the operations of a step that admits 64 sequences, with 3 waiting for each of `num_tenants` tenants."""
    c = core(policy=Fair, max_num_seqs=64)
    for key in range(3 * num_tenants):
        c.add(make_sequence(key, [1] * 10, 2, tenant=f"t{key % num_tenants}"))
    operations = count_operations(lambda: c.schedule(0))
    assert len(running(c)) == 64
    return operations


def test_admission_cost_is_independent_of_the_number_of_tenants(core: NewCore) -> None:
    assert operations_to_admit(core, 4000) < 1.5 * operations_to_admit(core, 100)


def test_a_new_tenant_costs_the_same_when_all_known_ones_wait(core: NewCore) -> None:
    c = core(policy=Fair, max_num_seqs=1)
    for key in range(fair.REMEMBERED_TENANTS + 10):
        c.add(make_sequence(key, [1] * 10, 2, tenant=f"t{key}"))
    newcomer = make_sequence(key + 1, [1] * 10, 2, tenant="another")
    assert count_operations(lambda: c.add(newcomer)) < 2000


def test_state_of_cancelled_sequences_of_new_tenants_is_bounded(core: NewCore) -> None:
    c = core(policy=lambda *options: Fair(*options, max_remembered=8), max_num_seqs=1)
    c.add(make_sequence(0, [1] * 10, 2, tenant="first"))
    for key in range(1, 1000):
        c.add(make_sequence(key, [1] * 10, 2, tenant=f"t{key}"))
        c.cancel(key)
    policy = c.waiting
    assert len(policy.tenants) <= 9  # type: ignore[attr-defined]
    assert len(policy.heap) <= 20  # type: ignore[attr-defined]
    assert policy.peek().tenant == "first"


def test_an_unknown_policy_is_refused_with_the_available_ones() -> None:
    with pytest.raises(
        InvalidArgument, match="scheduling_policy: 'lottery' does not exist; available: fcfs, priority, fair"
    ):
        find_policy("lottery")


def test_a_sequence_that_cannot_meet_its_deadline_is_not_computed(core: NewCore) -> None:
    c = core(max_num_seqs=2)
    c.add(make_sequence(0, [0] * 1000, 2))
    c.schedule(0.0)
    c.apply(StepResult(1, np.array([5], dtype=np.int32)), 1.0)  # 1 ms a token
    c.add(make_sequence(1, [1] * 1000, 2, deadline=1.5))
    c.add(make_sequence(2, [2] * 1000, 2, deadline=2.5))
    plan = c.schedule(1.0)
    assert plan is not None
    assert [admission.sequence.key for admission in plan.admitted] == [2]
    finished = c.take_events().finished
    assert [(f.sequence.key, f.reason) for f in finished] == [(1, Reason.DEADLINE)]
    assert finished[0].failure is not None
    assert "nothing was computed" in finished[0].failure.message


@pytest.mark.parametrize(
    ("outputs", "rule", "repeats"),
    [
        ([1, 2, 3] * 3, (2, 3, 3), True),
        ([1, 2, 3] * 2, (2, 3, 3), False),
        ([1, 2] * 4, (2, 5, 4), True),
        ([7] * 4, (1, 1, 4), True),
        ([7, 7, 8, 7], (1, 2, 3), False),
    ],
)
def test_s27_repetition(outputs: list[int], rule: tuple[int, int, int], repeats: bool) -> None:
    assert RepetitionRule(*rule).repeats(outputs) is repeats


@pytest.mark.parametrize(("minimum", "ended_after"), [(0, 6), (9, 9)])
def test_s27_a_loop_ends_the_sequence_but_not_before_min_tokens(core: NewCore, minimum: int, ended_after: int) -> None:
    c = core(block_size=4)
    rule = RepetitionRule(2, 3, 3)
    c.add(make_sequence(0, [9] * 10, 50, block_size=4, repetition=rule, min_output_tokens=minimum, eos_token_ids=(1,)))
    tokens = 0
    while c.has_work:
        step(c, token=5 + tokens % 2)
        tokens += 1
    assert tokens == ended_after
    assert [f.reason for f in c.take_events().finished] == [Reason.REPETITION]


def test_s27_the_end_of_sequence_wins_over_repetition(core: NewCore) -> None:
    c = core()
    c.add(make_sequence(0, [9] * 10, 50, repetition=RepetitionRule(1, 1, 2), eos_token_ids=(5,)))
    step(c, token=5)
    assert [f.reason for f in c.take_events().finished] == [Reason.STOP]


def test_s27_repetition_is_detected_in_a_token_after_preemption(core: NewCore) -> None:
    c = core(block_size=4)
    c.add(make_sequence(0, [9] * 10, 50, block_size=4, repetition=RepetitionRule(1, 1, 2)))
    step(c)
    assert c.schedule(0) is not None
    c.preempt(0)
    flight = c.steps_in_flight[0]
    c.apply(StepResult(flight.step_id, np.array([5], dtype=np.int32)), 0)
    assert [f.reason for f in c.take_events().finished] == [Reason.REPETITION]
    assert not c.has_work


def test_a_running_sequence_counts_its_tokens(core: NewCore) -> None:
    c = core(block_size=4)
    sequence = make_sequence(0, [9] * 10, 50, block_size=4)
    c.add(sequence)
    for num_output in range(1, 8):
        step(c)
        assert sequence.num_tokens == 10 + num_output
        assert sequence.last_output(3) == [5] * min(3, num_output)
    c.preempt(0)
    assert sequence.num_tokens == 17
