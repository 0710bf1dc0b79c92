"""A dead loop is distinguished from a slow one, and from a suspended process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

from quire.shared.process import liveness, watchdog
from quire.shared.process.liveness import Liveness

# A service whose loop does what BODY says; the watchdog loses patience after half a second.
PROGRAM = """
import asyncio, sys, time
from quire.shared.process import lifecycle, watchdog
watchdog.TURN_S, watchdog.MAX_TURNS = 0.05, 10

async def service(shutdown):
    lifecycle.announce_ready("test", "t")
{body}

sys.exit(lifecycle.run(service))
"""


def start(body: str) -> subprocess.Popen[str]:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    command, pipe = [sys.executable, "-c", PROGRAM.format(body=lines)], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "quire-test ready id=t\n"
    return process


def test_a_loop_that_stands_still_for_good_ends_the_process_and_shows_where() -> None:
    process = start("while True:\n    time.sleep(0.01)")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == watchdog.EXIT_STUCK
    assert "event loop has been stuck" in errors
    assert "in service" in errors


def test_a_loop_that_is_slow_is_left_alone() -> None:
    process = start("for _ in range(10):\n    time.sleep(0.2)\n    await asyncio.sleep(0.06)")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_process_that_was_stopped_goes_on() -> None:
    process = start("await asyncio.to_thread(sys.stdin.readline)")
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    time.sleep(1.5)
    _, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_part_that_ends_unasked_ends_the_process_with_a_reason() -> None:
    process = start("from quire.shared.process.supervision import run_vital\nawait run_vital('http', asyncio.sleep(0))")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "quire: http ended unexpectedly\n")


class EndingPart:
    """EndingPart items, pending and done."""

    def __init__(self) -> None:
        self.there = self.done = 0

    def progress(self) -> dict[str, object]:
        return {"work": self.done} if self.there else {}


def test_who_has_work_and_does_not_get_ahead_is_dead_until_it_does() -> None:
    living, work = Liveness(), EndingPart()
    living.watch(work.progress, 5 * liveness.LOOK_S)
    for _ in range(20):
        living.look()
    assert living.is_alive, "there is nothing to do"
    work.there = 1
    for _ in range(6):
        assert living.is_alive
        living.look()
    living.look()
    assert not living.is_alive
    work.done += 1
    living.look()
    assert living.is_alive


def test_who_is_slow_is_alive() -> None:
    living, work = Liveness(), EndingPart()
    living.watch(work.progress, 5 * liveness.LOOK_S)
    work.there = 1
    for look in range(50):
        work.done += look % 5 == 0
        living.look()
        assert living.is_alive


def test_one_dead_part_is_seen_beside_others_that_live() -> None:
    living, done = Liveness(), 0
    living.watch(lambda: {"dead": 1, "alive": done}, 3 * liveness.LOOK_S)
    for _ in range(10):
        done += 1
        living.look()
    assert not living.is_alive


async def test_it_tells_at_every_look() -> None:
    told: asyncio.Queue[bool] = asyncio.Queue()

    async def tell(is_alive: bool) -> None:
        told.put_nowait(is_alive)

    living = Liveness()
    running = asyncio.ensure_future(living.run(tell))
    assert await asyncio.wait_for(told.get(), 60) is True
    running.cancel()
