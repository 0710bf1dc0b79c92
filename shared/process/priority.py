"""Work that may wait: it leaves the processors to what clients wait for, and has them when nobody else wants them.

Where processors are few, dozens of long texts or a form that takes seconds to compile would else hold up every step of
every stream.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# Behind the process itself: a third of its share (sched(7)). With much less a thread that has the interpreter's lock
# could stand still.
NICENESS = 5


def lower_priority(process: int | None = None) -> None:
    """Puts the calling thread, and processes that it starts, behind `process`, which is its own unless it is named.
    Elsewhere than on Linux priorities are of whole processes."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # not where a sandbox forbids it
            ahead = os.getpriority(os.PRIO_PROCESS, process or os.getpid())
            os.setpriority(os.PRIO_PROCESS, thread, ahead + NICENESS)  # at most 19, says the kernel
