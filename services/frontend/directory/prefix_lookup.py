"""Looks up which schedulers' workers have cached a prompt's prefix, within a time budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.services.frontend.directory.directory import Directory
from quire.services.frontend.scheduler_client.placement import NO_CACHED_TOKENS, CachedTokens, Candidate
from quire.services.frontend.scheduler_client.prompt_hashes import supported_block_size
from quire.services.frontend.scheduler_client.sequence import PromptRequest
from quire.shared.logs import logger
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.prefix_index import PrefixReader, WorkerEntry
from quire.shared.process.supervision import Tasks

log = logger("directory")

MIN_BLOCKS = 4  # shortest prompt looked up; computing less costs no more than choosing a busier scheduler
MAX_AT_ONCE = 8  # concurrent lookups, each with a Redis connection
MAX_WAITING = 64  # waiting requests; MAX_AT_ONCE lookups serve about as many within the budget


@dataclass(frozen=True, slots=True)
class LookupTiming:
    """Times of prefix lookups, in seconds."""

    budget_s: float = 0.02  # longest wait of a request; computing a few hundred tokens takes about as long
    pause_s: float = 1.0  # without lookups after a failed one


DEFAULT_TIMING = LookupTiming()


class PrefixLocator(Protocol):
    """Knows approximately how many tokens of a prompt each scheduler's workers have cached."""

    async def cached_tokens(self, requests: Seq[PromptRequest]) -> list[CachedTokens]:
        """Returns the cached tokens per scheduler, one mapping per request."""


class NullPrefixLocator:
    """The locator without Redis: nothing is known to be cached."""

    async def cached_tokens(self, requests: Seq[PromptRequest]) -> list[CachedTokens]:
        return [NO_CACHED_TOKENS] * len(requests)


class IndexQuery(NamedTuple):
    """A lookup in the published caches of one block size."""

    reader: PrefixReader
    block_size: int
    workers: Seq[WorkerEntry]


class PrefixLookup:
    """Looks prefixes up in Redis. After a failure it pauses, and then lets a single request try."""

    def __init__(
        self,
        directory: Directory,
        sessions: Callable[[], Seq[Candidate]],
        metrics: FrontendMetrics,
        clock: Callable[[], float] = time.monotonic,
        timing: LookupTiming = DEFAULT_TIMING,
    ) -> None:
        """Stores the collaborators. `sessions`: candidates for new sequences; `clock`: for the pauses."""
        self._directory = directory
        self._sessions = sessions
        self._outcomes = metrics.prefix_lookups
        self._duration = metrics.prefix_lookup_duration
        self._clock = clock
        self._timing = timing
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._lookups = Tasks()
        self._num_waiting = 0
        self._failed = False
        self._pause_until_s = 0.0

    async def cached_tokens(self, requests: Seq[PromptRequest]) -> list[CachedTokens]:
        """Implements PrefixLocator.cached_tokens() with concurrent lookups; a lookup that is skipped or fails yields an
        empty mapping."""
        return (
            [await self._cached(requests[0])]
            if len(requests) == 1
            else await asyncio.gather(*map(self._cached, requests))
        )

    async def _cached(self, request: PromptRequest) -> CachedTokens:
        """Returns the cached tokens of one prompt by scheduler, and records the outcome; never raises an error of
        Redis."""
        queries = self._queries(request) if self._may_look_up else []
        if not queries:
            self._outcomes["skipped"].inc()
            return NO_CACHED_TOKENS
        self._num_waiting += 1
        started_s = time.perf_counter()  # the event loop's clock has millisecond resolution
        try:
            cached, outcome = await self._within_budget(request, queries)
        finally:
            self._num_waiting -= 1
        self._duration.observe(time.perf_counter() - started_s)
        self._outcomes[outcome].inc()
        return cached

    @property
    def _may_look_up(self) -> bool:
        """Whether Redis is up, no pause is running, and fewer than MAX_WAITING lookups wait (after a failure: none)."""
        if not self._directory.is_up or self._clock() < self._pause_until_s:
            return False
        return self._num_waiting < (1 if self._failed else MAX_WAITING)

    def _queries(self, request: PromptRequest) -> list[IndexQuery]:
        """Returns the lookups to make, one per block size; empty if the result could not change the placement: a single
        session, a short prompt, or no publishing worker."""
        sessions = self._sessions()
        if len(sessions) < 2 or request.sampling.skip_reading_prefix_cache:
            return []
        scheduler_ids = {session.scheduler_id for session in sessions}
        queries = []
        for block_size in {supported_block_size(session.view.layout) for session in sessions}:
            index = self._directory.index(block_size)
            if index is not None and request.num_prompt_tokens >= MIN_BLOCKS * block_size:
                workers = [worker for worker in index.workers if worker.scheduler in scheduler_ids]
                queries.append(IndexQuery(index.reader, block_size, workers))
        return [query for query in queries if query.workers]

    async def _within_budget(self, request: PromptRequest, queries: Seq[IndexQuery]) -> tuple[CachedTokens, str]:
        """Returns the cached tokens and the outcome's label. A lookup that exceeds the budget or fails pauses further
        ones and yields nothing."""
        try:
            async with asyncio.timeout(self._timing.budget_s):
                await self._slots.acquire()
                cached = await asyncio.shield(self._start_lookup(request, queries))
        except TimeoutError:
            self._pause("no answer in time")
            return NO_CACHED_TOKENS, "timeout"
        except Exception as error:  # Redis may be away, and may hold anything
            self._pause(str(error) or repr(error))
            return NO_CACHED_TOKENS, "error"
        self._failed = False
        return cached, "hit" if cached else "miss"

    def _pause(self, reason: str) -> None:
        """Skips lookups for a pause; after that a single one tries until one succeeds."""
        log.debug("pausing prefix lookups", reason=reason)
        self._failed = True
        self._pause_until_s = self._clock() + self._timing.pause_s

    def _start_lookup(self, request: PromptRequest, queries: Seq[IndexQuery]) -> asyncio.Task[CachedTokens]:
        """Starts the lookup in a task that outlives its caller: cancelling it would cost the Redis connection."""
        task = self._lookups.start("prefix lookup", _look_up(request, queries))
        task.add_done_callback(self._on_answer)
        return task

    def _on_answer(self, task: asyncio.Task[CachedTokens]) -> None:
        """Frees the lookup's slot when it has ended, also if its caller is gone."""
        self._slots.release()
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, also if the caller is gone

    async def close(self) -> None:
        await self._lookups.close()


async def _look_up(request: PromptRequest, queries: Seq[IndexQuery]) -> CachedTokens:
    """Returns the longest cached prefix in tokens by scheduler, over the workers of all queried block sizes."""
    cached: dict[str, int] = {}
    for reader, block_size, workers in queries:
        for match in await reader.match(request.hashes.block_hashes(block_size), workers):
            scheduler, num_tokens = match.worker.scheduler, match.num_blocks * block_size
            cached[scheduler] = max(cached.get(scheduler, 0), num_tokens)
    return cached
