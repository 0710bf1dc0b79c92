"""State of the worker for AdminService, /metrics and health checks."""

from __future__ import annotations

import os
import time

from quire.services.worker.engine.engine import Engine
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.loading.progress import Progress
from quire.services.worker.runner.expert_load import LoadByLayer
from quire.shared.metrics.worker import NO_ENCODER_CACHE, EncoderCacheUse
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.process.lifecycle import Shutdown
from quire.shared.settings import WorkerSettings
from quire.shared.version import VERSION

STALLED_AFTER_S = 10.0  # longer than any intended step


class WorkerStatus:
    """Aggregates the worker's state for its readers; the session sets `epoch` when it attaches and detaches."""

    def __init__(self, name: str, address: str, shutdown: Shutdown, progress: Progress) -> None:
        """Creates the status of a worker whose engine is not built yet. `address`: of its gRPC server; `progress`:
        progress of loading the weights."""
        self._progress = progress
        self._name = name
        self._address = address
        self._shutdown = shutdown
        self._engine: Engine | None = None
        self._limits: WorkerLimits | None = None
        self._settings: WorkerSettings | None = None  # None until the engine is built
        self.epoch = 0  # 0: not attached

    def set_engine(self, engine: Engine, limits: WorkerLimits, settings: WorkerSettings) -> None:
        """Stores the built engine; from then on read() reports blocks, running sequences and ranks."""
        self._engine, self._limits, self._settings = engine, limits, settings

    def expert_load(self) -> LoadByLayer:
        """Returns tokens per expert and layer of a mixture of experts, as last published by the device thread."""
        return self._engine.expert_load if self._engine else {}

    def encoder_cache(self) -> EncoderCacheUse:
        """Returns the use of the encoder cache, as last published by the device thread; all 0 without an encoder."""
        if self._engine is None or self._engine.media is None:
            return NO_ENCODER_CACHE
        found = self._engine.occupancy
        capacity = self._engine.started.result().media.capacity
        return EncoderCacheUse(found.num_encoder_rows, found.num_encoder_items, capacity)

    @property
    def state(self) -> pb.State:
        """DRAINING after a shutdown request, STARTING without an attachment, STALLED if the oldest plan is unanswered
        for more than 10 s, else READY."""
        if self._shutdown.requested:
            return pb.STATE_DRAINING
        if not self.epoch:
            return pb.STATE_STARTING
        return pb.STATE_STALLED if self._is_stalled() else pb.STATE_READY

    def read(self) -> pb.ServiceStatus:
        """Returns a snapshot of state, epoch and age of the last step; bytes loaded while starting; block counts
        (without the null block) and ranks once the engine is built."""
        status = pb.ServiceStatus(
            role=pb.ROLE_WORKER,
            id=self._name,
            pid=os.getpid(),
            address=self._address,
            state=self.state,
            epoch=self.epoch,
            last_step_age_s=self._last_step_age_s(),
            version=VERSION,
        )
        if status.state == pb.STATE_STARTING:
            status.loaded_bytes, status.weight_bytes = self._progress.loaded_bytes, self._progress.total_bytes
        if self._settings is not None:
            status.num_ranks = self._settings.num_ranks
            status.num_stages = self._settings.pipeline_parallel_size
            status.num_contexts = self._settings.context_parallel_size
        if self._engine and self._limits:
            occupancy, total = self._engine.occupancy, self._limits.num_blocks - 1
            status.running = occupancy.num_live
            status.blocks.total = total
            status.blocks.used = occupancy.num_used_blocks
            status.blocks.cached = occupancy.num_cached_blocks
            status.blocks.free = total - occupancy.num_used_blocks - occupancy.num_cached_blocks
        return status

    def _is_stalled(self) -> bool:
        return bool(self._engine and self._engine.oldest_pending_s > STALLED_AFTER_S)

    def _last_step_age_s(self) -> float | None:
        """Returns the seconds since the last step ended; None before the first."""
        ended_s = self._engine.last_step_s if self._engine else None
        return None if ended_s is None else time.monotonic() - ended_s
