"""Lower CPU priority for background work, which then uses only what request processing leaves.

On machines with few cores, dozens of long texts or a grammar that takes seconds to compile would otherwise delay
every step of every stream.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# Relative to the process: a third of its share (sched(7)). With much less, a thread that holds the interpreter's lock
# could starve.
NICENESS = 5


def lower_priority(process: int | None = None) -> None:
    """Lowers the calling thread's priority, and that of processes it starts, below that of `process` (default: its
    own process). Linux only: elsewhere priorities apply to whole processes."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            ahead = os.getpriority(os.PRIO_PROCESS, process or os.getpid())
            os.setpriority(os.PRIO_PROCESS, thread, ahead + NICENESS)  # the kernel caps it at 19
