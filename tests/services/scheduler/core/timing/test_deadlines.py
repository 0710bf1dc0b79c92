"""Order of deadlines, and removal of those of finished sequences."""

from __future__ import annotations

import random

from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.timing.deadlines import MIN_HEAP_SIZE, Deadlines
from tests.services.scheduler.conftest import make_sequence


def test_deadlines_expire_in_order() -> None:
    draw = random.Random(3)
    alive: dict[int, Sequence] = {}
    deadlines = Deadlines(alive)
    now = 0.0
    for key in range(5_000):
        sequence = make_sequence(key, [1], deadline=now + draw.choice((0.5, 20.0, 3_000.0)))
        deadlines.add(sequence)
        alive[key] = sequence
        if draw.random() < 0.9:
            del alive[draw.choice(list(alive))]
        now += 0.1
        due = sorted((s.deadline, k) for k, s in alive.items() if s.deadline <= now)
        passed = [(s.deadline, s.key) for s in deadlines.pop_expired(now)]
        assert passed == due
        for _, over in passed:
            del alive[over]


def test_deadlines_of_finished_sequences_are_removed() -> None:
    alive: dict[int, Sequence] = {}
    deadlines = Deadlines(alive)
    for key in range(10_000):
        alive[key] = make_sequence(key, [1], deadline=600.0)
        deadlines.add(alive[key])
        if len(alive) > 40:
            del alive[key - 40]
    assert len(deadlines) <= MIN_HEAP_SIZE + 2 * 41 + 1
