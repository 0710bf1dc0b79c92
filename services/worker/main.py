"""Entry point of the worker: starts background preparation before torch is imported, then the service."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from quire.kernels.cpu import first_start
from quire.services.worker.attach.timing import DEFAULT_TIMING, WorkerTiming
from quire.services.worker.models.registry import check_config
from quire.services.worker.warmup import compile_process, early_init
from quire.shared import logs
from quire.shared.models.model_identity import read_config
from quire.shared.process import lifecycle
from quire.shared.settings import WorkerSettings

log = logs.logger("worker.main")


async def serve(settings: WorkerSettings, shutdown: lifecycle.Shutdown, timing: WorkerTiming = DEFAULT_TIMING) -> None:
    """Prepares the process and runs a worker until `shutdown`: checks the model's config, starts compiling kernels or
    builds the CPU kernels, then runs service.serve(). With `node_rank` it serves ranks for the worker on another host
    instead. Raises QuireError for unsupported models and settings."""
    logs.configure(settings.name, settings.log_level, settings.log_format)
    if settings.engine == "device":  # reject unsupported models before torch is imported
        check_config(read_config(Path(settings.model)), settings.model_impl)
    if settings.node_rank:
        from quire.services.worker.building.rank_processes.node import serve_node

        await serve_node(settings, shutdown)
        return
    compiler = compile_process.start(settings)
    if settings.device == "cuda":
        early_init.start()
    elif not await asyncio.to_thread(first_start.ensure, log.warning):
        # Torch computes: its idle OpenMP threads would spin on cores that the other services need.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from quire.services.worker import service  # imports torch

    await service.serve(settings, shutdown, compiler, timing)
