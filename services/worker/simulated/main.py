"""Composition root of simulated workers, any number of them in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from quire.services.worker.attach import hello
from quire.services.worker.attach.session import AttachmentLoop
from quire.services.worker.limits import worker_limits
from quire.services.worker.simulated.engine import SimulatedEngine
from quire.services.worker.simulated.timing import Timing
from quire.shared import logs
from quire.shared.media.model_processors import MediaProcessors
from quire.shared.models import model_identity
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process import lifecycle
from quire.shared.process.supervision import Tasks
from quire.shared.rpc.server import Server
from quire.shared.settings import WorkerSettings

DEFAULT_BLOCKS = 4096
ROWS_KEPT = 1 << 15  # of media, by default

log = logs.logger("worker.simulated")


async def serve(settings: WorkerSettings, shutdown: lifecycle.Shutdown) -> None:
    """Runs `simulated_workers` workers in this process until `shutdown`; their scheduler then migrates the work to
    others. With several, "-0", "-1", ... is appended to their names."""
    logs.configure(settings.name, settings.log_level, settings.log_format)
    server = Server(settings.host, settings.grpc_port, (), tls=settings.tls)
    address = settings.reachable(server.port)
    await server.start()
    names = [settings.name]
    if settings.simulated_workers > 1:
        names = [f"{settings.name}-{i}" for i in range(settings.simulated_workers)]
    workers = [SimulatedWorker(settings, name, address, shutdown) for name in names]
    tasks = Tasks()
    tasks.start("announcement", _announce(settings, server, workers, address))
    try:
        await asyncio.gather(*(worker.run() for worker in workers))
    finally:
        await tasks.close()
        await server.stop(grace_s=0.2)


async def _announce(settings: WorkerSettings, server: Server, workers: list[SimulatedWorker], address: str) -> None:
    """Sets gRPC health to serving and announces readiness when all workers have attached."""
    for worker in workers:
        await worker.is_attached.wait()
    await server.set_serving(True)
    lifecycle.announce_ready("worker", settings.name, grpc=address)


class SimulatedWorker:
    """A scheduler session with a simulated engine; its limits come from the settings and the model's config.json."""

    def __init__(self, settings: WorkerSettings, name: str, address: str, shutdown: lifecycle.Shutdown) -> None:
        config = model_identity.read_config(Path(settings.model))
        limits = worker_limits.from_settings(settings, config["max_position_embeddings"])
        limits = worker_limits.fit(limits, settings.num_blocks or DEFAULT_BLOCKS, explicit=bool(settings.max_model_len))
        timing = Timing(
            settings.simulated_step_ms / 1e3,
            1 / settings.simulated_prompt_tokens_per_s,
            settings.simulated_sequence_us / 1e6,
        )
        self.is_attached = asyncio.Event()
        self._engine = SimulatedEngine(limits, config["vocab_size"], timing)
        message = hello.base_hello(settings, name, address, limits)
        message.device = "simulated"
        processors = MediaProcessors() if settings.language_model_only else MediaProcessors.read(Path(settings.model))
        if processors.modalities:
            rows = max(ROWS_KEPT, processors.max_embeddings)
            capacity = settings.encoder_cache_size or rows
            message.encoder.CopyFrom(pb.Encoder(capacity=capacity, modalities=processors.modalities))
        self._session = AttachmentLoop(settings, self._engine, message, self, shutdown)

    async def run(self) -> None:
        await lifecycle.run_until_first(self._session.run(), self._engine.run())

    async def attached(self, _welcome: pb.SchedulerWelcome) -> None:
        self.is_attached.set()

    def detached(self, *, broken: bool) -> None:
        pass
