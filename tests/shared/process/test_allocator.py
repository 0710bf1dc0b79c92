"""Allocator settings, measured in processes started like services."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from quire.cluster.options import ServiceSpec
from quire.cluster.process import ServiceProcess
from quire.shared.process import allocator
from tests.deploy import dockerfile
from tests.deploy.test_dockerfiles import DOCKERFILE

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

# Threads that hold a piece each, all at the same time, then pieces of 400 bytes that are freed: how many arenas there
# are, and how much memory counts as in use without being used.
SCRIPT = """
import ctypes, json, re, sys, threading
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.open_memstream.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used".split()]
    _fields_ += [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]
libc.mallinfo2.restype = Info
wait = threading.Barrier(8)
def hold():
    piece = libc.malloc(100_000)
    wait.wait()
    libc.free(piece)
threads = [threading.Thread(target=hold) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
text, size = ctypes.c_char_p(), ctypes.c_size_t()
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
libc.malloc_info(0, stream)
libc.fclose(stream)
arenas = text.value.count(b"<heap nr=")
pieces = [libc.malloc(size) for size in [int(sys.argv[1])] * 7]
before = libc.mallinfo2().used
[libc.free(piece) for piece in pieces]
print(json.dumps({"arenas": arenas, "given_back": before - libc.mallinfo2().used}))
"""


def seen(role: str, size: int) -> dict[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if name != allocator.VARIABLE}
    environment = {**inherited, **allocator.environment(role, inherited)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(size)], env=environment, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(("role", "size"), [("frontend", 400), ("scheduler", 400), ("worker", 800)])
def test_a_service_has_one_arena_and_keeps_no_large_pieces_by_thread(role: str, size: int) -> None:
    found = seen(role, size)
    assert found["arenas"] == 1
    assert found["given_back"] >= 7 * size


def test_without_it_there_are_many_and_what_is_freed_counts_as_in_use() -> None:
    """Shows that the test above can fail."""
    found = seen("redis", 400)
    assert found["arenas"] > 1
    assert found["given_back"] < 400


def test_who_has_decided_otherwise_is_obeyed() -> None:
    assert allocator.environment("frontend", {allocator.VARIABLE: "glibc.malloc.arena_max=4"}) == {}
    assert allocator.environment("redis", {}) == {}


@pytest.mark.parametrize("role", allocator.SMALL)
def test_images_have_the_same(role: str) -> None:
    for name in {"worker": ("worker", "worker-cuda")}.get(role, (role,)):
        stage = dockerfile.target(DOCKERFILE, name)
        assert stage.environment[allocator.VARIABLE] == allocator.environment(role, {})[allocator.VARIABLE]


class Telling(ServiceSpec):
    """Service that prints its environment and exits."""

    def command(self) -> list[str]:
        told = f"'id={self.id}', 'http=' + os.environ['{allocator.VARIABLE}']"
        tell = f"import os; print('quire-{self.role} ready', {told})"
        return [sys.executable, "-c", tell]


def test_a_cluster_starts_its_services_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(allocator.VARIABLE, raising=False)
    service = ServiceProcess(Telling("scheduler", "scheduler-0", {}), print, None)
    service.start()
    assert service.ready.wait(60)
    service.close()
    assert service.addresses["http"] == allocator.environment("scheduler", {})[allocator.VARIABLE]
