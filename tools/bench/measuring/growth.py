"""Growth of a process's resources over repeated samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.bench.report import Row
from tools.bench.measuring.trend import GROWS, UNCLEAR, Slope, slope

MIB = 2**20
HOUR_S = 3600.0
SETTLED = 0.5  # share of the time in which caches and pools fill; growth is measured after it
SHORTEST_S = 600.0  # of settled time; in less, filling caches would count as growth
MAX_BYTES_PER_CALL = 16  # upper end of the interval up to which memory counts as flat


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """Resources of one process at one time."""

    at_s: float
    memory: int  # private bytes; mapped files depend on the machine's free memory
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int, at_s: float) -> ProcessSample | None:
        """Samples the process's private memory in bytes, descriptors and threads at `at_s`; None if it has exited."""
        try:
            resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
            descriptors, threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
        except (OSError, ValueError):
            return None
        return cls(at_s, (resident - shared) * os.sysconf("SC_PAGE_SIZE"), descriptors, threads)


def process_growth(looks: Sequence[ProcessSample], seconds: float, calls: int) -> Row:
    """Returns the values at both ends of the settled time, and slopes per hour with confidence intervals and, if
    that time is long enough, a verdict; empty for a short-lived process. `seconds`: duration of the load; `calls`:
    its number of calls."""
    settled = [look for look in looks if look.at_s >= looks[0].at_s + SETTLED * seconds]
    if not settled:
        return {}
    first, last = settled[0], settled[-1]
    ends = {
        "mem_mib": first.memory / MIB,
        "mem_end_mib": last.memory / MIB,
        "fds": first.descriptors,
        "fds_end": last.descriptors,
        "threads": first.threads,
        "threads_end": last.threads,
    }
    return {**ends, **_slopes(settled, seconds, calls)}


def _slopes(settled: Sequence[ProcessSample], seconds: float, calls: int) -> Row:
    """Returns the growth of memory, descriptors and threads per hour and per call, with verdicts; empty with too few
    samples."""
    memory = slope([(look.at_s, look.memory) for look in settled])
    descriptors = slope([(look.at_s, look.descriptors) for look in settled])
    threads = slope([(look.at_s, look.threads) for look in settled])
    if memory is None or descriptors is None or threads is None:
        return {}
    by_call = memory.times(seconds / max(1, calls))
    return {
        **_by_hour("mem_mib", memory.times(1 / MIB)),
        "bytes_call_low": by_call.low,
        "bytes_call_high": by_call.high,
        "mem": by_call.verdict(MAX_BYTES_PER_CALL) if _is_judged(seconds) else UNCLEAR,
        "fds_h": descriptors.value * HOUR_S,
        "threads_h": threads.value * HOUR_S,
        **_grown(seconds, {"mem": memory, "fds": descriptors, "threads": threads}),
    }


def block_growth(looks: Sequence[tuple[float, int]], seconds: float) -> Row:
    """Returns the maximum and slope of unowned blocks; a leak shows before the load has ended."""
    settled = [look for look in looks if look[0] >= SETTLED * seconds]
    if not settled:
        return {}
    most = max(blocks for _, blocks in settled)
    unowned = slope(settled)
    if unowned is None:
        return {"unowned_most": most}
    return {"unowned_most": most, "unowned_h": unowned.value * HOUR_S, **_grown(seconds, {"unowned": unowned})}


def _by_hour(name: str, of: Slope) -> Row:
    of = of.times(HOUR_S)
    return {f"{name}_h": of.value, f"{name}_h_low": of.low, f"{name}_h_high": of.high}


def _is_judged(seconds: float) -> bool:
    return (1 - SETTLED) * seconds >= SHORTEST_S


def _grown(seconds: float, slopes: dict[str, Slope]) -> Row:
    """Returns the resources that certainly grow, by name."""
    grown = [name for name, of in slopes.items() if of.verdict(0) == GROWS]
    return {"grows": " ".join(grown) if _is_judged(seconds) else ""}
