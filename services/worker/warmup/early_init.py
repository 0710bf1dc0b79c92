"""GPU startup work of half a second, done while torch is imported; this module does not import it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
import threading
from collections.abc import Callable

SWITCH_INTERVAL_S = 1e-4  # hashing requests the GIL after every megabyte while modules are imported


def start() -> None:
    """Starts hashing Triton's sources and initializing the CUDA driver in a daemon thread, and shortens the GIL's
    switch interval meanwhile; does nothing without Triton."""
    with contextlib.suppress(ImportError):
        triton_key = importlib.import_module("triton.runtime.cache").triton_key
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        threading.Thread(target=_wait, args=(triton_key,), daemon=True).start()


def _wait(triton_key: Callable[[], str]) -> None:
    """Computes Triton's source hash, which Triton caches, and initializes the driver, if there is one."""
    triton_key()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)
