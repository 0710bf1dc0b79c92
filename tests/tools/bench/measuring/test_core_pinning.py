"""Assignment of this machine's cores to roles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.shared.errors import InvalidArgument
from tests.waiting import until
from tools.bench.measuring import core_pinning

TWO_THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("started", flush=True)
time.sleep(0.5)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(60)
"""


@pytest.mark.parametrize(("count", "sizes"), [(8, (1, 2, 3, 2)), (16, (2, 4, 6, 4)), (11, (1, 2, 4, 4))])
def test_each_role_has_cores_of_its_own(count: int, sizes: tuple[int, ...]):
    cores = core_pinning.partition_cores(range(100, 100 + count))
    assert tuple(map(len, cores.values())) == sizes
    assert set().union(*cores.values()) == set(range(100, 100 + count))


def test_too_few_cores_are_told():
    with pytest.raises(InvalidArgument, match="requires at least 8 cores, this machine has 7"):
        core_pinning.partition_cores(range(7))


def threads_of(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


def test_all_threads_of_a_service_are_held_and_those_that_it_starts():
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen([sys.executable, "-c", TWO_THREADS], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        core_pinning.pin_services({"worker-0": process.pid, "redis": os.getpid()}, {"worker": {core}})
        until(lambda: len(threads_of(process.pid)) >= 3)
        threads = threads_of(process.pid)
        assert [os.sched_getaffinity(thread) for thread in threads] == 3 * [{core}]
    finally:
        process.kill()
        process.communicate()
