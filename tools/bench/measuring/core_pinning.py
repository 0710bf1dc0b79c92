"""Pins services to cores by role, the same cores in each cluster.

Otherwise clusters that take turns differ by several percent for as long as they run, depending on the cores that
they happen to use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.shared.errors import InvalidArgument

EIGHTHS = {"scheduler": 1, "worker": 2, "frontend": 3}  # share of the cores; clients use the rest
CLIENTS = "clients"


def partition_cores(cores: Sequence[int]) -> dict[str, set[int]]:
    """Splits the cores in fixed eighths between the roles and the clients; raises InvalidArgument for fewer than 8."""
    if len(cores) < 8:
        raise InvalidArgument(
            f"same_cores: requires at least 8 cores, this machine has {len(cores)}", field="same_cores"
        )
    left = list(cores)
    roles = {}
    for role, eighths in EIGHTHS.items():
        count = len(cores) * eighths // 8
        roles[role], left = set(left[:count]), left[count:]
    return roles | {CLIENTS: set(left)}


def pin_services(pids: Mapping[str, int], cores: Mapping[str, set[int]]) -> None:
    """Pins each service's process to its role's cores. `pids` are by service id, which is a role and a number."""
    for service, pid in pids.items():
        role = service.rpartition("-")[0] or service
        if role in cores:
            pin(pid, cores[role])


def pin(pid: int, cores: set[int]) -> None:
    """Pins all threads of a process to the cores, and so those that it starts later."""
    held: set[int] = set()
    while new := {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - held:
        for thread in new:
            with contextlib.suppress(ProcessLookupError):  # the process has exited
                os.sched_setaffinity(thread, cores)
        held |= new
