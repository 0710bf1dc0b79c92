"""The first task to end ends all; the second signal exits at once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from quire.shared.errors import Internal
from quire.shared.process import lifecycle
from tests.waiting import forever, loop_turns


async def test_what_loses_a_cancellation_is_cancelled_again() -> None:
    lost = []

    async def loses_one() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            lost.append(True)
        await forever()

    async def ends() -> None:
        await loop_turns(3)

    async with asyncio.timeout(60):
        await lifecycle.run_until_first(loses_one(), ends(), cancel_again_s=0.05)
    assert lost == [True]


async def test_what_the_first_raises_is_raised() -> None:
    async def fails() -> None:
        raise Internal("broken")

    with pytest.raises(Internal, match="broken"):
        await lifecycle.run_until_first(forever(), fails())


async def test_a_cancellation_that_nobody_asked_for_is_an_error() -> None:
    async def cancelled_from_within() -> None:
        raise asyncio.CancelledError

    with pytest.raises(Internal, match="cancelled unexpectedly"):
        await lifecycle.run_until_first(forever(), cancelled_from_within())


async def test_an_error_is_raised_before_a_cancellation_that_came_with_it() -> None:
    call: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def writes() -> None:
        await call

    async def reads() -> None:
        call.cancel()
        raise Internal("silent")

    with pytest.raises(Internal, match="silent"):
        await lifecycle.run_until_first(writes(), reads())


SERVICE = """
import asyncio, sys
from quire.shared import logs
from quire.shared.process import lifecycle

async def service(shutdown):
    logs.configure("s", "info", "text")
    if sys.argv[1] == "drains":
        shutdown.request()
    print("up", file=sys.stderr, flush=True)
    await shutdown.wait()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)  # what is under way

sys.exit(lifecycle.run(service))
"""


@pytest.mark.parametrize(
    ("begins", "num_signals", "status"),
    [("drains", 1, 0), ("serves", 1, 0), ("drains", 2, lifecycle.EXIT_FORCED), ("serves", 2, lifecycle.EXIT_FORCED)],
)
def test_a_service_that_drains_already_finishes_its_work_when_it_is_told_to_end(
    begins: str, num_signals: int, status: int
) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVICE, begins]
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stderr.readline() == "up\n"
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            assert "signal=SIGTERM" in process.stderr.readline()
        if status == 0:
            process.stdin.write("done\n")
            process.stdin.flush()
        assert process.wait() == status


LEAVES = """
import atexit, sys, threading
from quire.shared.process import lifecycle

class TakenAway:
    def __del__(self):
        print("Python's own end")

in_use = TakenAway()
threading.Thread(target=threading.Event().wait, daemon=True).start()
atexit.register(print, "registered", end="")
print("said", end=", ")
if sys.argv[1] == "leaves":
    lifecycle.exit_process(2)
sys.exit(2)
"""


@pytest.mark.parametrize(
    ("how", "said"), [("leaves", "said, registered"), ("ends", "said, registeredPython's own end\n")]
)
def test_who_leaves_takes_nothing_from_threads_that_go_on(how: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES, how], stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, said)
