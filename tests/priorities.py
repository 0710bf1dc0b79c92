"""Checks CPU priorities, also in a test run that itself has the lowest priority."""

from __future__ import annotations

import os

from quire.shared.process.priority import NICENESS

LOWEST = 19


def behind(niceness: int) -> int:
    """Returns the niceness of background work for processes of this niceness."""
    return min(niceness + NICENESS, LOWEST)


def has_stepped_back(process: int) -> bool:
    """Whether a process has a lower priority than this one."""
    return os.getpriority(os.PRIO_PROCESS, process) == behind(os.getpriority(os.PRIO_PROCESS, 0))
