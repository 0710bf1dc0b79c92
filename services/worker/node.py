"""A worker process that has no scheduler: ranks of a replica whose rank 0 is on another host."""

from __future__ import annotations

import asyncio
import threading

from services.worker.ranks.start import run_node
from shared import lifecycle
from shared.settings import WorkerSettings


async def serve_node(settings: WorkerSettings, shutdown: lifecycle.Shutdown) -> None:
    """Until `shutdown`; one that comes while steps run ends the replica. Raises QuireError for what does not fit."""
    stopping = threading.Event()
    work = asyncio.create_task(asyncio.to_thread(run_node, settings, stopping))
    asked = asyncio.create_task(shutdown.wait())
    await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
    stopping.set()
    asked.cancel()
    await work
