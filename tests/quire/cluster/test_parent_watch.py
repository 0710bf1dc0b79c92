"""Third-party programs end with their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cluster import parent_watch
from tests.waiting import has_ended, until

LAUNCHER = """
import sys, time
from pathlib import Path
from quire.cluster.options import RedisSpec
from quire.cluster.process import ServiceProcess

folder = Path(sys.argv[1])
(folder / "redis.conf").write_text("requirepass secret")
process = ServiceProcess(RedisSpec(folder / "socket", folder / "redis.conf"), lambda _: None, None)
process.start()
assert process.ready.wait(60)
print(process.pid, flush=True)
time.sleep(600)
"""


def starts(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, parent_watch.__file__, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def is_read(pipe: int) -> bool:
    """Returns whether a process holds the pipe's other end."""
    try:
        os.write(pipe, b"x")
    except BrokenPipeError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_the_redis_of_a_cluster_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher:
        redis = int(launcher.stdout.readline())
        os.kill(redis, 0)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        until(lambda: has_ended(redis), what="Redis runs on")


def test_a_program_that_does_not_listen_is_killed() -> None:
    command = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    )
    program = starts(sys.executable, "-c", command)
    assert program.stdin is not None
    assert program.stdout is not None
    with program:
        program.stdout.readline()
        program.stdin.close()
        assert program.wait(parent_watch.PATIENCE_S + 20) == -signal.SIGKILL


def test_what_watches_ends_with_the_program() -> None:
    program = starts(sys.executable, "-c", "import sys; sys.stdout.write(sys.stdin.read() + 'end'); sys.exit(3)")
    assert program.stdin is not None
    assert program.stdout is not None
    with program:
        assert program.stdout.read() == b"end", "what it reads is nothing, not the launcher's pipe"
        assert program.wait(20) == 3
        pipe = program.stdin.fileno()
        until(lambda: not is_read(pipe), what="somebody still watches")
