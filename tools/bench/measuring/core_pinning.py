"""Services on cores of their role's own, the same ones in each cluster.

Where clusters take turns, the cores that their services happen to live on set equal ones apart by several percent, for
as long as they run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.shared.errors import InvalidArgument

EIGHTHS = {"scheduler": 1, "worker": 2, "frontend": 3}  # of the cores; clients have the others
CLIENTS = "clients"


def partition_cores(cores: Sequence[int]) -> dict[str, set[int]]:
    """Cores of each role, and of the clients."""
    if len(cores) < 8:
        raise InvalidArgument(f"same_cores: needs 8 cores or more, there are {len(cores)}", field="same_cores")
    left = list(cores)
    roles = {}
    for role, eighths in EIGHTHS.items():
        count = len(cores) * eighths // 8
        roles[role], left = set(left[:count]), left[count:]
    return roles | {CLIENTS: set(left)}


def pin_services(pids: Mapping[str, int], cores: Mapping[str, set[int]]) -> None:
    """`pids`: by service id, which is its role and a number."""
    for service, pid in pids.items():
        role = service.rpartition("-")[0] or service
        if role in cores:
            pin(pid, cores[role])


def pin(pid: int, cores: set[int]) -> None:
    """All threads of a process, and those that they will start."""
    held: set[int] = set()
    while new := {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - held:
        for thread in new:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, cores)
        held |= new
