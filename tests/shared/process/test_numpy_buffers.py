"""Preallocation of numpy's array cache, measured in processes started like schedulers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from quire.shared.process import allocator

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

# Arrays of every small size that come and go: how much more is in use afterwards, bytes.
SCRIPT = """
import ctypes, sys
import numpy as np
from quire.shared.process import numpy_buffers
libc = ctypes.CDLL(None)
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used".split()]
    _fields_ += [("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]
libc.mallinfo2.restype = Info
if "fill" in sys.argv:
    numpy_buffers.preallocate()
before = libc.mallinfo2().used
for num_bytes in range(4, 1024, 4):
    arrays = [np.zeros(num_bytes // 4, np.int32) for _ in range(10)]
    del arrays
print(libc.mallinfo2().used - before)
"""


def grown(*words: str) -> int:
    environment = {**os.environ, **allocator.environment("scheduler", {})}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_arrays_that_come_and_go_leave_nothing_once_all_is_filled() -> None:
    assert grown("fill") < 50_000


def test_without_it_each_size_leaves_some() -> None:
    """Shows that the test above can fail."""
    assert grown() > 500_000
