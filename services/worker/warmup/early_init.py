"""What takes half a second of a start on a GPU, done while torch is imported: nothing here imports it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
import threading
from collections.abc import Callable

SWITCH_INTERVAL_S = 1e-4  # hashing asks for Python's lock after every megabyte, while modules are imported


def start() -> None:
    """Does nothing where there is no Triton."""
    with contextlib.suppress(ImportError):
        triton_key = importlib.import_module("triton.runtime.cache").triton_key
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        threading.Thread(target=_wait, args=(triton_key,), daemon=True).start()


def _wait(triton_key: Callable[[], str]) -> None:
    """All of Triton's code is read and hashed, which it remembers; the driver is opened, if there is one."""
    triton_key()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)
