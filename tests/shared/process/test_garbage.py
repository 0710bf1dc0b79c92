"""Searches for cyclic garbage keep out of the way of work."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from services.scheduler import bench_scheduler
from shared.process import garbage


class Process:
    """One whose load the test says."""

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
    process.collector.hurry()
    process.collector.hurry()
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


@pytest.fixture
def as_in_a_service() -> Iterator[None]:
    before = gc.get_threshold()
    loop = asyncio.new_event_loop()
    garbage.Collector().start(loop)
    yield
    loop.close()
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("as_in_a_service")
def test_steps_in_which_as_many_sequences_end_as_come_are_not_interrupted() -> None:
    drive = bench_scheduler.Drive(512, bench_scheduler.LIFE)
    for _ in range(bench_scheduler.WARMUP):
        drive.step()
    searches: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            searches.append(about["generation"])

    gc.callbacks.append(note)
    try:
        for _ in range(300):
            drive.step()
    finally:
        gc.callbacks.remove(note)
    assert len(searches) <= 1
    assert 2 not in searches
