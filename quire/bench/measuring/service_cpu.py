"""CPU time of the services, from /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
UTIME, STIME = 11, 12  # fields after the command's name in /proc/<pid>/stat, see proc(5)


def seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """Returns the user and system time of each live process, by service id."""
    found = {}
    for service, pid in pids.items():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[service] = (int(fields[UTIME]) + int(fields[STIME])) / TICKS_PER_S
    return found


def per_token(before: Mapping[str, float], after: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Returns microseconds per token, summed over the processes of a role: cpu_us_tok_frontend and so on."""
    roles: dict[str, float] = {}
    for service in before.keys() & after.keys():
        role = service.rpartition("-")[0] or service
        roles[role] = roles.get(role, 0.0) + after[service] - before[service]
    return {f"cpu_us_tok_{role}": used / max(1, num_tokens) * 1e6 for role, used in sorted(roles.items())}
