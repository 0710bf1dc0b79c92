from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from os import _exit
from pathlib import Path

import pytest
import torch

from quire.kernels import cpu
from tests.kernels.cpu.closeness import needs_library

pytestmark = pytest.mark.skipif(**needs_library)


@pytest.fixture
def layer():
    packed = cpu.prepare_linear(torch.randn(2048, 512), None)
    x = torch.randn(40, 512)
    return x, packed, cpu.linear(x, packed)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_callers_at_the_same_time_get_their_own_results(layer, threads):
    x, packed, want = layer
    cpu.set_num_threads(threads)

    def compute(i: int) -> bool:
        return torch.equal(cpu.linear(x[i % 40 :], packed), want[i % 40 :])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(compute, range(200)))


def test_threads_can_be_changed_between_kernels(layer):
    x, packed, want = layer
    for threads in (3, 1, 2, 1, 4):
        cpu.set_num_threads(threads)
        assert cpu.num_threads() == threads
        assert torch.equal(cpu.linear(x, packed), want)


def test_a_forked_child_computes(layer):
    x, packed, want = layer
    cpu.set_num_threads(2)
    expected = want.numpy().tobytes()
    child = os.fork()
    if child == 0:  # no threaded torch functions: threads do not survive a fork
        _exit(0 if cpu.linear(x, packed).numpy().tobytes() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_idle_threads_sleep(layer):
    x, packed, _ = layer
    cpu.set_num_threads(3)
    before = set(os.listdir("/proc/self/task"))
    cpu.linear(x, packed)
    own = set(os.listdir("/proc/self/task")) - before
    assert len(own) == 2
    deadline = time.monotonic() + 60
    while any(state(task) != "S" for task in own):
        assert time.monotonic() < deadline, "a thread still spins"


def state(task: str) -> str:
    return Path(f"/proc/self/task/{task}/stat").read_text().rsplit(")", 1)[1].split()[0]
