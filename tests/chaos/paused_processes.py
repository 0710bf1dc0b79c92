"""Processes that are stopped for a while, and faults that persist."""

from __future__ import annotations

import asyncio
import os
import signal


async def keep_fault(seconds: float) -> None:
    """Keeps a fault active for `seconds`."""
    await asyncio.sleep(seconds)


async def pause_processes(seconds: float, *pids: int) -> None:
    """Stops processes (SIGSTOP) and continues them after `seconds`."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        await keep_fault(seconds)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
