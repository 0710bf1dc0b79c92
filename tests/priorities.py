"""Checks CPU priorities, also in a test run that itself has the lowest priority."""

from __future__ import annotations

import os
import threading

from quire.shared.process.priority import NICENESS

LOWEST = 19


def behind(niceness: int) -> int:
    """Returns the niceness of background work for processes of this niceness."""
    return min(niceness + NICENESS, LOWEST)


def has_stepped_back(process: int) -> bool:
    """Whether a process has a lower priority than this one."""
    return os.getpriority(os.PRIO_PROCESS, process) == behind(os.getpriority(os.PRIO_PROCESS, 0))


def thread_priorities(name: str) -> dict[str, int]:
    """Returns the niceness of this process's threads with the name's prefix, and of the main thread."""
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith(name) or thread is threading.main_thread():
            assert thread.native_id is not None
            found[thread.name] = os.getpriority(os.PRIO_PROCESS, thread.native_id)
    return found
