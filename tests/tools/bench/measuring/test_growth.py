"""Growth of a process from samples, and samples of this process."""

from __future__ import annotations

import os
import random
import re
import threading
from pathlib import Path

import pytest

from tools.bench.measuring import growth
from tools.bench.measuring.growth import MAX_BYTES_PER_CALL, MIB, ProcessSample

SECONDS = 1200  # of a load, with a look every 12


def looks(bytes_a_second: float = 0.0, descriptors_a_second: int = 0, begin_s: int = 0) -> list[ProcessSample]:
    return [
        ProcessSample(float(second), round(100 * MIB + bytes_a_second * second), 50 + descriptors_a_second * second, 7)
        for second in range(begin_s, SECONDS, 12)
    ]


def test_a_leak_has_a_slope_and_a_name() -> None:
    row = growth.process_growth(looks(MIB, 1), SECONDS, 12_000)
    assert (row["mem_mib"], row["mem_end_mib"]) == (700, 1288)
    assert row["mem_mib_h"] == row["mem_mib_h_low"] == row["mem_mib_h_high"] == pytest.approx(3600)
    assert row["bytes_call_low"] == row["bytes_call_high"] == pytest.approx(MIB / 10)
    assert row["fds_h"] == pytest.approx(3600)
    assert (row["mem"], row["grows"]) == ("grows", "mem fds")


def test_what_stays_is_flat_and_nothing_grows() -> None:
    row = growth.process_growth(looks(), SECONDS, 1000)
    assert (row["mem"], row["mem_mib_h"], row["bytes_call_high"], row["threads_h"]) == ("flat", 0, 0, 0)
    assert row["grows"] == ""


def test_memory_that_goes_up_and_down_by_more_than_the_bound_is_not_called_flat() -> None:
    draw = random.Random(1)
    swing = [ProcessSample(look.at_s, look.memory + draw.randrange(MIB), 50, 7) for look in looks()]
    few, many = (growth.process_growth(swing, SECONDS, calls) for calls in (100, 1_000_000))
    assert few["bytes_call_high"] > MAX_BYTES_PER_CALL
    assert (few["mem"], few["grows"]) == ("unclear", "")
    assert many["mem"] == "flat", "the same swing, of so many calls that none can have left much"


def test_a_process_is_looked_at_once_it_has_settled_itself() -> None:
    """A process started during the load grows for a while."""
    late = looks(begin_s=480)
    filling = [ProcessSample(look.at_s, look.memory - (MIB if look.at_s < 720 else 0), 50, 7) for look in late]
    row = growth.process_growth(filling, SECONDS, 1000)
    assert row["mem_mib"] == row["mem_end_mib"] == 100
    few = growth.process_growth(late[:52], SECONDS, 1000)
    assert (few["mem_end_mib"], few.get("mem_mib_h")) == (pytest.approx(100), None), "too few looks for a slope"
    assert growth.process_growth(looks(begin_s=960), SECONDS, 1000) == {}, "it did not live long enough"


def test_a_short_load_is_measured_and_not_judged() -> None:
    """Caches take minutes to fill."""
    short = [ProcessSample(look.at_s / 12, look.memory, look.descriptors, look.threads) for look in looks(MIB, 1)]
    row = growth.process_growth(short, SECONDS / 12, 1000)
    assert row["mem_mib_h_low"] == pytest.approx(12 * 3600)
    assert (row["mem"], row["grows"]) == ("unclear", "")


def test_blocks_that_nobody_owns_show_while_the_load_goes_on() -> None:
    row = growth.block_growth([(float(second), 2 * second) for second in range(SECONDS)], SECONDS)
    assert row["unowned_most"] == 2 * SECONDS - 2
    assert row["unowned_h"] == pytest.approx(7200)
    assert row["grows"] == "unowned"
    assert growth.block_growth([(SECONDS / 2, 3)], SECONDS) == {"unowned_most": 3}, "too few looks for a slope"
    assert growth.block_growth([(0.0, 3)], SECONDS) == {}


def test_a_look_at_this_process() -> None:
    before = ProcessSample.of(os.getpid(), 1.0)
    assert before is not None
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with open(os.devnull) as _:
        after = ProcessSample.of(os.getpid(), 2.0)
    end.set()
    thread.join()
    assert after is not None
    assert after.memory > MIB
    assert (after.descriptors, after.threads) == (before.descriptors + 1, before.threads + 1)
    assert ProcessSample.of(2**22 + 1, 1.0) is None, "no process has such a number"


def test_every_name_of_a_row_is_explained() -> None:
    """The page's table for readers of `python -m tools.bench soak` explains every name."""
    section = (Path(__file__).parents[4] / "docs" / "benchmarks" / "long-runs.md").read_text()
    table = "".join(line.partition("|")[2].partition("|")[0] for line in section.splitlines() if line.startswith("| `"))
    explained = set(re.findall(r"`(\w+)`", table))
    grown = growth.process_growth(looks(MIB, 1), 1800, 1000) | growth.block_growth(
        [(look.at_s, 3) for look in looks()], 1800
    )
    assert len(grown) > 15
    assert set(grown) <= explained
    assert {"service", "pid", "calls", "kills", "errors", "unowned_blocks"} <= explained
