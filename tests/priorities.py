"""Whether work steps back behind what clients wait for, also in a run that has the lowest priority itself."""

from __future__ import annotations

import os

from quire.shared.process.priority import NICENESS

LOWEST = 19


def behind(niceness: int) -> int:
    """Of what is to wait for those of `niceness`."""
    return min(niceness + NICENESS, LOWEST)


def has_stepped_back(process: int) -> bool:
    """Behind this one."""
    return os.getpriority(os.PRIO_PROCESS, process) == behind(os.getpriority(os.PRIO_PROCESS, 0))
