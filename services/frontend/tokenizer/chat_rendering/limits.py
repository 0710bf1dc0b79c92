"""Bounds on what a chat template may cost, in the process that runs it."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from quire.shared.errors import InvalidArgument

MEMORY_BYTES = 512 << 20  # beyond what the process has when it begins
TEXT_CHARACTERS = 1 << 26  # of a rendered conversation
STATM = Path("/proc/self/statm")


class CpuTimeExceeded(Exception):
    """The template has used up its processor time."""


def bound_memory(num_bytes: int = MEMORY_BYTES) -> None:
    """Makes allocations beyond the bound a MemoryError of this process, which leaves no dump of its memory either."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not STATM.exists():
        return
    used = int(STATM.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


@contextlib.contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raises CpuTimeExceeded in the body after `seconds` of processor time; main thread only. A process that
    is busy within one operation, and does not come to that, is ended by the system a second or two later (SIGXCPU)."""
    signal.signal(signal.SIGPROF, _stop)
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


def _stop(*_: object) -> None:
    raise CpuTimeExceeded


def cpu_time_error(label: str, seconds: float) -> InvalidArgument:
    return InvalidArgument(
        f"messages: the chat template {label} takes more than {seconds:g} s; send a shorter conversation, or start the"
        " server with another --chat-template",
        field="messages",
    )


def memory_error(label: str) -> InvalidArgument:
    return InvalidArgument(
        f"messages: the chat template {label} needs more than {MEMORY_BYTES >> 20} MiB; send a shorter conversation, or"
        " start the server with another --chat-template",
        field="messages",
    )
