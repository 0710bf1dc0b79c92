"""Limits that a process puts on its own memory and processor time, before it computes what others have sent."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

STATM = Path("/proc/self/statm")


class CpuTimeExceeded(Exception):
    """The processor time that was granted is used up."""


def limit_memory(num_bytes: int) -> None:
    """Makes allocations beyond the present size plus `num_bytes` raise MemoryError (Linux only), and disables core
    dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not STATM.exists():
        return
    used = int(STATM.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


@contextlib.contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """Raises CpuTimeExceeded in the body after `seconds` of processor time; main thread only.

    A process that is busy within one operation of a library, where Python cannot raise, is ended by the system a second
    or two later (SIGXCPU)."""
    signal.signal(signal.SIGPROF, _raise_exceeded)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(_used_s() + seconds) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _used_s() -> float:
    times = os.times()
    return times.user + times.system


def _raise_exceeded(*_: object) -> None:
    raise CpuTimeExceeded
