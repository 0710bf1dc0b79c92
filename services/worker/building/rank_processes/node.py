"""Worker process without a scheduler: ranks of a replica whose rank 0 is on another host."""

from __future__ import annotations

import asyncio
import threading

from quire.services.worker.building.rank_processes.start import run_node
from quire.shared.process import lifecycle
from quire.shared.settings import WorkerSettings


async def serve_node(settings: WorkerSettings, shutdown: lifecycle.Shutdown) -> None:
    """Runs this host's ranks in a thread until `shutdown`, which ends a running replica, or until they fail. Raises
    QuireError for incompatible nodes."""
    stopping = threading.Event()
    work = asyncio.get_running_loop().run_in_executor(None, run_node, settings, stopping)
    try:
        await lifecycle.run_until_first(asyncio.shield(work), shutdown.wait())
    finally:
        stopping.set()
    await work
