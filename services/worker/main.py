"""Begins the worker: first what is to go on while torch is imported, then all of it."""

from __future__ import annotations

from services.worker import ahead, compile_process
from shared import lifecycle
from shared.settings import WorkerSettings


async def serve(settings: WorkerSettings, shutdown: lifecycle.Shutdown) -> None:
    """Runs a worker until `shutdown`, then lets its scheduler move the work elsewhere."""
    compiler = compile_process.begin(settings)
    if settings.device == "cuda":
        ahead.begin()
    from services.worker import service  # and torch with it

    await service.serve(settings, shutdown, compiler)
