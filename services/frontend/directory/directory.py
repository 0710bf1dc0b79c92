"""Reads who is there, about once a second. Whatever Redis does, what was known stays known and serving goes on."""

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
    """The caches that workers of one block layout have published."""

    reader: PrefixReader
    workers: Seq[WorkerEntry] = ()


class Directory:
    """`run()` it in a task of its own."""

    def __init__(
        self,
        redis: Any,
        namespace: str,
        model: model_pb2.ModelIdentity,
        *,
        sessions: Callable[[], Seq[Candidate]],
        on_schedulers: Callable[[Seq[SchedulerEntry]], None],
        metrics: FrontendMetrics,
    ) -> None:
        """`sessions`: those whose block layouts are of interest."""
        self._redis = redis
        self._namespace = namespace
        self._model = model
        self._malformed = MalformedEntries(lambda kind: metrics.malformed_entries[kind].inc())
        self._registry = RegistryReader(redis, RegistryKeys(namespace), self._malformed)
        self._sessions = sessions
        self._on_schedulers = on_schedulers
        self._indexes: dict[int, PublishedCaches] = {}
        self._is_up: bool | None = None  # not known yet
        self._metrics = metrics

    @property
    def is_up(self) -> bool:
        """Redis answered the last time."""
        return bool(self._is_up)

    def index(self, block_size: int) -> PublishedCaches | None:
        """None if there is none yet."""
        return self._indexes.get(block_size)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._read()
            except Exception as error:  # Redis may be away, and may hold anything
                self._set_up(False, str(error) or repr(error))
            else:
                self._set_up(True)
            await cancellable_sleep(INTERVAL_S)

    async def _read(self) -> None:
        self._on_schedulers(await self._registry.schedulers())
        for session in self._sessions():
            block_size = supported_block_size(session.view.layout)
            if block_size and block_size not in self._indexes:
                keys = BlockKeys.of(self._namespace, self._model, session.view.layout)
                self._indexes[block_size] = PublishedCaches(PrefixReader(self._redis, keys, self._malformed))
        for index in self._indexes.values():
            index.workers = await index.reader.workers()

    def _set_up(self, up: bool, reason: str = "") -> None:
        if up and not self._is_up:
            log.info("redis serves")
        elif not up and self._is_up is not False:
            log.warning("redis does not serve; going on with what is known", reason=reason)
        self._is_up = up
        self._metrics.redis_up.set(up)

    async def close(self) -> None:
        await self._redis.aclose()
