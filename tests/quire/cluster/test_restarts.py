"""Restart delays: none for a process that was ready, growing ones for repeated failures."""

from __future__ import annotations

from quire.cluster.restarts import FIRST_PAUSE_S, MAX_PAUSE_S, MAX_QUICK, WINDOW_S, Restarts


def test_ten_deaths_of_a_process_that_had_been_ready_cost_the_shortest_pause_each() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(now, was_ready=True) for now in range(10)] == [FIRST_PAUSE_S] * 10


def test_a_process_that_never_gets_ready_has_pauses_that_double() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(now, was_ready=False) for now in range(12)]
    assert pauses[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == MAX_PAUSE_S


def test_getting_ready_starts_the_pauses_afresh() -> None:
    restarts = Restarts()
    for now in range(8):
        restarts.pause_s(now, was_ready=False)
    assert restarts.pause_s(8, was_ready=True) == FIRST_PAUSE_S
    assert restarts.pause_s(9, was_ready=False) == FIRST_PAUSE_S


def test_a_loop_of_getting_ready_and_dying_is_bounded() -> None:
    restarts, now, deaths = Restarts(), 0.0, 0
    while now < WINDOW_S:
        now += 0.1 + restarts.pause_s(now, was_ready=True)
        deaths += 1
    assert deaths <= MAX_QUICK + WINDOW_S / MAX_PAUSE_S + 8
    assert restarts.pause_s(now + 2 * WINDOW_S, was_ready=True) == FIRST_PAUSE_S
