"""Processes that are stopped for a while, and faults that last."""

from __future__ import annotations

import asyncio
import os
import signal


async def keep_fault(seconds: float) -> None:
    """Keeps a fault up for as long."""
    await asyncio.sleep(seconds)


async def pause_processes(seconds: float, *pids: int) -> None:
    """Stops processes, and lets them go on after so long a time."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        await keep_fault(seconds)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
