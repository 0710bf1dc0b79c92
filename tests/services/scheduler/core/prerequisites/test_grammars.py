"""Sequences under grammars: blocked until the worker has compiled theirs, and then scheduled like all others."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepResult
from quire.services.scheduler.core.prerequisites import grammars
from quire.services.scheduler.core.prerequisites.grammars import GrammarOrder
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus, WorkerLoss
from tests.services.scheduler.conftest import make_sequence

NewCore = Callable[..., Core]
A, B = b"a" * 32, b"b" * 32


def under(key: int, grammar_id: bytes, **fields: object) -> Sequence:
    return make_sequence(key, [key, 1, 2], grammar_id=grammar_id, **fields)


def orders(core: Core) -> list[tuple[str, bytes]]:
    return [("release" if o.sequence is None else "prepare", o.grammar_id) for o in core.grammars.take_orders()]


def run(core: Core) -> list[int]:
    """Runs one step; returns the keys of its sequences."""
    plan = core.schedule(0)
    if plan is None:
        return []
    keys = core.steps_in_flight[0].keys.tolist()
    core.apply(StepResult(plan.step_id, np.full(len(keys), 7, dtype=np.int32)), now=0)
    return keys


def test_a_grammar_is_ordered_once_and_unblocks_its_sequences(core: NewCore) -> None:
    c = core()
    for key in (1, 2):
        c.add(under(key, A))
    c.add(under(3, B))
    c.add(make_sequence(4, [4]))
    assert orders(c) == [("prepare", A), ("prepare", B)]
    assert (c.num_waiting, len(c.waiting)) == (4, 1)
    assert run(c) == [4]  # sequences without a grammar do not wait
    c.on_grammar_prepared(A)
    assert run(c) == [4, 1, 2]
    c.on_grammar_prepared(B)
    assert run(c) == [4, 1, 2, 3]
    assert orders(c) == []


def test_a_failed_grammar_ends_the_sequences_that_wait_for_it(core: NewCore) -> None:
    c = core()
    c.add(under(1, A))
    c.add(under(2, B))
    c.on_grammar_prepared(A, Failure("INVALID_ARGUMENT", "no"))
    (end,) = c.take_events().finished
    assert (end.sequence.key, end.reason, end.failure) == (1, Reason.ERROR, Failure("INVALID_ARGUMENT", "no"))
    assert c.num_waiting_tokens == 3
    orders(c)
    c.add(under(3, A))
    assert orders(c) == [("prepare", A)]  # it may have been the worker's fault


def test_blocked_sequences_can_be_cancelled_and_expire(core: NewCore) -> None:
    c = core()
    c.add(under(1, A))
    c.add(under(2, A, deadline=5.0))
    c.cancel(1)
    c.schedule(6.0)
    ends = c.take_events().finished
    assert [(end.sequence.key, end.reason) for end in ends] == [(1, Reason.CANCELLED), (2, Reason.DEADLINE)]
    assert ends[1].failure == Failure("DEADLINE_EXCEEDED", "the deadline passed while the sequence was blocked")
    c.on_grammar_prepared(A)  # arrives late, and unblocks no sequence
    assert not c.has_work
    assert c.num_waiting_tokens == 0


def test_a_preempted_sequence_keeps_its_grammar(core: NewCore) -> None:
    c = core()
    c.add(under(1, A))
    c.on_grammar_prepared(A)
    run(c)
    c.preempt(0)
    assert run(c) == [1]
    assert orders(c) == [("prepare", A)]


def test_grammars_of_a_lost_worker_are_ordered_again_elsewhere(core: NewCore) -> None:
    c, other = core(), core()
    for key, grammar_id in ((1, A), (2, B), (3, B)):
        c.add(under(key, grammar_id))
    c.on_grammar_prepared(A)
    run(c)
    moved = c.evacuate(WorkerLoss("w", 1))
    assert [sequence.key for sequence in moved] == [1, 2, 3]
    for sequence in moved:
        other.add(sequence)
    assert orders(other) == [("prepare", A), ("prepare", B)]
    assert all(sequence.status is SequenceStatus.BLOCKED for sequence in moved)
    other.on_grammar_prepared(B)
    other.on_grammar_prepared(A)
    assert run(other) == [2, 3, 1]


def test_idle_grammars_are_kept_up_to_the_limit(core: NewCore) -> None:
    c = core()
    names = [bytes([i]) * 32 for i in range(grammars.MAX_IDLE + 1)]
    for key, name in enumerate(names):
        c.add(under(key, name))
        c.on_grammar_prepared(name)
        c.cancel(key)
    assert orders(c) == [*(("prepare", name) for name in names), ("release", names[0])]
    c.add(under(1005, names[1]))
    assert run(c) == [1005]
    assert orders(c) == []
    c.add(under(1006, names[0]))
    assert orders(c) == [("prepare", names[0])]


def test_large_idle_grammars_are_released(core: NewCore) -> None:
    c = core()
    for key, num_bytes in enumerate((grammars.MAX_IDLE_BYTES, 1)):
        c.add(under(key, bytes([key]) * 32, grammar_bytes=num_bytes))
        c.on_grammar_prepared(bytes([key]) * 32)
        c.cancel(key)
    assert orders(c)[2:] == [("release", bytes(32))]


@pytest.mark.parametrize("seed", range(20))
def test_the_worker_has_all_running_grammars_and_releases_others(core: NewCore, seed: int) -> None:
    """Random arrivals, failures, cancellations and preemptions, with a worker that follows the orders. Grammars are so
    large that only one of them is kept without users."""
    rng = random.Random(seed)
    c = core(max_num_seqs=4)
    held: dict[bytes, int] = {}
    due: list[bytes] = []

    def obey(order: GrammarOrder) -> None:
        if order.sequence is not None:
            due.append(order.grammar_id)
        else:
            held[order.grammar_id] -= 1

    for key in range(300):
        what = rng.randrange(5)
        if what < 2:
            grammar_id = rng.choice([A, B, b"c" * 32])
            c.add(under(key, grammar_id, max_tokens=rng.randrange(1, 5), grammar_bytes=grammars.MAX_IDLE_BYTES))
        elif what == 2 and due:
            name = due.pop(rng.randrange(len(due)))
            failure = Failure("INVALID_ARGUMENT", "no") if rng.random() < 0.2 else None
            held[name] = held.get(name, 0) + (failure is None)
            c.on_grammar_prepared(name, failure)
        elif what == 3 and c.has_work:
            c.cancel(rng.choice(c.keys_of(0)))
        else:
            run(c)
        for order in c.grammars.take_orders():
            obey(order)
        assert all(count in (0, 1) for count in held.values())
        for slot in np.flatnonzero(c.running.live).tolist():
            assert held[c.running.sequence(slot).grammar_id] == 1
    for key in c.keys_of(0):
        c.cancel(key)
    for name in due:
        c.on_grammar_prepared(name)
        held[name] = held.get(name, 0) + 1
    for order in c.grammars.take_orders():
        obey(order)
    assert sum(held.values()) <= 1
    assert c.num_waiting == c.num_waiting_tokens == 0
