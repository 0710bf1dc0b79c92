"""State shared with other frontends through Redis: API keys and their usage, discovered schedulers, cached prefixes,
streams."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

from quire.services.frontend.access.access import Access
from quire.services.frontend.access.shared_usage import SharedUsage
from quire.services.frontend.access.sources import KeyFile, KeySource, RedisKeys, SingleKey
from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.composition.timing import FrontendTiming
from quire.services.frontend.directory.directory import Directory
from quire.services.frontend.directory.prefix_lookup import NullPrefixLocator, PrefixLocator, PrefixLookup
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.scheduler_client.client import SchedulerClient
from quire.services.frontend.streams.policy import RUNNING_PART, StreamPolicy
from quire.services.frontend.streams.redis_store import RedisStore
from quire.services.frontend.streams.store import NullStreamStore
from quire.services.frontend.streams.streams import Streams
from quire.shared import prefix_index
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.process.supervision import run_restarting
from quire.shared.settings.frontend import FrontendSettings


class SharedState:
    """Connects to the shared state. Without Redis, only keys from the settings or a file exist, and streams are
    local."""

    def __init__(self, settings: FrontendSettings, metrics: FrontendMetrics, timing: FrontendTiming) -> None:
        self._settings = settings
        self._timing = timing
        self._metrics = metrics
        self._keys: RedisKeys | None = None
        self.access = Access(self._sources(), metrics, time.monotonic)
        self._usage: SharedUsage | None = None
        if settings.redis != "none" and not self.access.allows_anonymous:
            on_error = metrics.access_errors.inc
            self._usage = SharedUsage(self._connect(), settings.redis_namespace, self.access.accounts, on_error)
        self.directory: Directory | None = None
        self._locator: PrefixLookup | None = None

    def _sources(self) -> list[KeySource]:
        """Returns the key sources that the settings name: a single key, and a file or the hash in Redis. An unusable
        file raises InvalidArgument."""
        settings, sources, on_error = self._settings, list[KeySource](), self._metrics.access_errors.inc
        if settings.api_key:
            sources.append(SingleKey(settings.api_key))
        if settings.api_keys == "redis":
            self._keys = RedisKeys(self._connect(), settings.redis_namespace, on_error, self._timing.key_reload_s)
            sources.append(self._keys)
        elif settings.api_keys:
            sources.append(KeyFile(settings.api_keys, on_error))
        return sources

    def _connect(self) -> Any:
        settings = self._settings
        return prefix_index.connect(settings.redis, password_file=settings.redis_password_file, tls=settings.tls)

    def prefix_locator(self, identity: model_pb2.ModelIdentity, client: SchedulerClient) -> PrefixLocator:
        """Returns the locator of cached prompt prefixes. Its directory adds discovered schedulers of this model to
        `client`."""
        if self._settings.redis == "none":
            return NullPrefixLocator()
        self.directory = Directory(
            self._connect(),
            self._settings.redis_namespace,
            identity,
            sessions=lambda: client.usable_sessions,
            on_schedulers=client.connections.update,
            metrics=self._metrics,
            interval_s=self._timing.registry_poll_s,
        )
        self._locator = PrefixLookup(
            self.directory, lambda: client.usable_sessions, self._metrics, timing=self._timing.prefix_lookup
        )
        return self._locator

    def streams(self, generator: Generator, calls: Calls) -> Streams:
        """Returns the resumable streams; without Redis they are local to this process."""
        settings = self._settings
        is_shared = settings.redis != "none"
        store = RedisStore(self._connect(), settings.redis_namespace) if is_shared else NullStreamStore()
        max_running = max(1, settings.max_inflight_requests // RUNNING_PART)
        policy = StreamPolicy(settings.stream_retention_s, settings.parsed_stream_limits, max_running)
        return Streams(generator, calls, store, policy=policy, metrics=self._metrics.streams)

    def tasks(self) -> list[Awaitable[None]]:
        """Returns the background tasks, to be run as long as the frontend runs."""
        parts = (("directory", self.directory), ("API keys", self._keys), ("API key usage", self._usage))
        return [run_restarting(name, part.run, is_needed=False) for name, part in parts if part is not None]

    async def close(self) -> None:
        for part in (self._locator, self.directory, self._keys, self._usage):
            if part is not None:
                await part.close()
