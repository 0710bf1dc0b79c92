"""Garbage collection avoids busy times."""

from __future__ import annotations

import asyncio
import gc

from quire.services.scheduler import bench_scheduler
from quire.shared.process import garbage


class Process:
    """A simulated process with a controlled load."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.collected: list[float] = []
        self.collector = garbage.Collector(lambda: self.now, lambda: self.used, lambda: self.collected.append(self.now))

    def pass_time(self, seconds: float, load: float) -> None:
        for _ in range(round(seconds / garbage.LOOK_S)):
            self.now += garbage.LOOK_S
            self.used += load * garbage.LOOK_S
            self.collector.look()


def test_what_leaves_much_garbage_is_not_waited_for_however_busy_the_process_is() -> None:
    process = Process()
    process.pass_time(100, load=0.9)
    process.collector.request_collection()
    process.collector.request_collection()
    process.pass_time(100, load=0.9)
    assert process.collected == [105]
    process.pass_time(600, load=0.9)
    assert process.collected == [105, 705]


def test_everything_is_searched_when_there_is_little_to_do_but_not_all_the_time() -> None:
    process = Process()
    process.pass_time(200, load=0.5)
    assert process.collected == []
    process.pass_time(100, load=0.01)
    assert process.collected == [205, 265]


def test_without_any_pause_it_is_searched_all_the_same_now_and_then() -> None:
    process = Process()
    process.pass_time(1500, load=0.9)
    assert process.collected == [600, 1200]


def test_steps_in_which_as_many_sequences_end_as_come_are_not_interrupted() -> None:
    drive = bench_scheduler.SimulatedLoad(512, bench_scheduler.LIFE)
    for _ in range(bench_scheduler.WARMUP):
        drive.step()
    searches: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            searches.append(about["generation"])

    gc.callbacks.append(note)
    try:
        with garbage.service_gc_thresholds():
            searches.clear()  # the one before it began
            for _ in range(300):
                drive.step()
    finally:
        gc.callbacks.remove(note)
    assert len(searches) <= 1
    assert 2 not in searches


def test_a_loop_that_begins_makes_searches_as_seldom() -> None:
    before, loop = gc.get_threshold(), asyncio.new_event_loop()
    try:
        garbage.Collector().start(loop)
        begun = gc.get_threshold()
        gc.set_threshold(*before)
        with garbage.service_gc_thresholds():
            assert gc.get_threshold() == begun != before
        assert gc.get_threshold() == before
    finally:
        loop.close()
        gc.set_threshold(*before)
