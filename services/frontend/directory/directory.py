"""Reads schedulers and workers from the registry about once a second. While Redis fails, the last state is kept."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from quire.services.frontend.scheduler_client.placement import Candidate
from quire.services.frontend.scheduler_client.prompt_hashes import supported_block_size
from quire.shared.logs import logger
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.prefix_index import (
    BlockKeys,
    MalformedEntries,
    PrefixReader,
    RegistryKeys,
    RegistryReader,
    SchedulerEntry,
    WorkerEntry,
)
from quire.shared.process.supervision import cancellable_sleep

log = logger("directory")

INTERVAL_S = 1.0


@dataclass(slots=True)
class PublishedCaches:
    """Reader of the published prefix caches with one block size, and the workers that publish them."""

    reader: PrefixReader
    workers: Seq[WorkerEntry] = ()


class Directory:
    """Polls the registry in Redis for schedulers of the model and for published prefix caches; `run()` it in a task."""

    def __init__(
        self,
        redis: Any,
        namespace: str,
        model: model_pb2.ModelIdentity,
        *,
        sessions: Callable[[], Seq[Candidate]],
        on_schedulers: Callable[[Seq[SchedulerEntry]], None],
        metrics: FrontendMetrics,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Starts empty. `sessions`: sessions whose block sizes are of interest; `on_schedulers`: called with all
        registered schedulers after each read."""
        self._redis = redis
        self._namespace = namespace
        self._model = model
        self._malformed = MalformedEntries(lambda kind: metrics.malformed_entries[kind].inc())
        self._registry = RegistryReader(redis, RegistryKeys(namespace), self._malformed)
        self._sessions = sessions
        self._on_schedulers = on_schedulers
        self._caches: dict[int, PublishedCaches] = {}
        self._is_up: bool | None = None  # not known yet
        self._metrics = metrics
        self._interval_s = interval_s

    @property
    def is_up(self) -> bool:
        """Whether the last read from Redis succeeded."""
        return bool(self._is_up)

    def index(self, block_size: int) -> PublishedCaches | None:
        """Returns the published caches for a block size, or None if not read yet."""
        return self._caches.get(block_size)

    async def run(self) -> None:
        """Polls the registry in intervals until cancelled; after any failure the last known state stays."""
        while True:
            try:
                await self._read()
            except Exception as error:  # Redis may be unavailable or hold malformed data
                self._set_is_up(False, str(error) or repr(error))
            else:
                self._set_is_up(True)
            await cancellable_sleep(self._interval_s)

    async def _read(self) -> None:
        """Reports the registered schedulers, adds a reader for each new block size of the sessions, and refreshes the
        workers of every reader."""
        self._on_schedulers(await self._registry.schedulers())
        for session in self._sessions():
            block_size = supported_block_size(session.view.layout)
            if block_size and block_size not in self._caches:
                keys = BlockKeys.of(self._namespace, self._model, session.view.layout)
                self._caches[block_size] = PublishedCaches(PrefixReader(self._redis, keys, self._malformed))
        for index in self._caches.values():
            index.workers = await index.reader.workers()

    def _set_is_up(self, up: bool, reason: str = "") -> None:
        """Sets the state and its metric, and logs a change with its reason."""
        if up and not self._is_up:
            log.info("Redis is available")
        elif not up and self._is_up is not False:
            log.warning("Redis is unavailable; keeping the last known state", reason=reason)
        self._is_up = up
        self._metrics.redis_up.set(up)

    async def close(self) -> None:
        await self._redis.aclose()
