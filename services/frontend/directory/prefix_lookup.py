"""Which schedulers' workers hold how much of a prompt. Never holds a request up for longer than the budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
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

BUDGET_S = 0.02  # longest that a request waits to know: about what computing a few hundred tokens takes
PAUSE_S = 1.0  # without look-ups, after one that failed
MIN_BLOCKS = 4  # of a prompt; computing less than that costs no more than a detour to a busier scheduler
MAX_AT_ONCE = 8  # look-ups under way, each with a connection to Redis
MAX_WAITING = 64  # requests that wait for a look-up: what so many can do within the budget


class PrefixLocator(Protocol):
    """Knows where prompts are cached, more or less."""

    async def cached_tokens(self, works: Seq[PromptRequest]) -> list[CachedTokens]:
        """For each work."""


class NullPrefixLocator:
    """Without Redis."""

    async def cached_tokens(self, works: Seq[PromptRequest]) -> list[CachedTokens]:
        return [NO_CACHED_TOKENS] * len(works)


class IndexQuery(NamedTuple):
    """To one index."""

    reader: PrefixReader
    block_size: int
    workers: Seq[WorkerEntry]


class PrefixLookup:
    """Asks the index. After a failure it pauses, and then a single request tries how it is."""

    def __init__(
        self,
        directory: Directory,
        sessions: Callable[[], Seq[Candidate]],
        metrics: FrontendMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sessions`: those that work may go to; `clock` is for the pauses."""
        self._directory = directory
        self._sessions = sessions
        self._outcomes = metrics.prefix_lookups
        self._duration = metrics.prefix_lookup_duration
        self._clock = clock
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._asking = Tasks()
        self._num_waiting = 0
        self._failed = False
        self._pause_until_s = 0.0

    async def cached_tokens(self, works: Seq[PromptRequest]) -> list[CachedTokens]:
        return [await self._cached(works[0])] if len(works) == 1 else await asyncio.gather(*map(self._cached, works))

    async def _cached(self, work: PromptRequest) -> CachedTokens:
        queries = self._queries(work) if self._may_ask else []
        if not queries:
            self._outcomes["skipped"].inc()
            return NO_CACHED_TOKENS
        self._num_waiting += 1
        started_s = time.perf_counter()  # the event loop's clock counts whole milliseconds
        try:
            cached, outcome = await self._within_budget(work, queries)
        finally:
            self._num_waiting -= 1
        self._duration.observe(time.perf_counter() - started_s)
        self._outcomes[outcome].inc()
        return cached

    @property
    def _may_ask(self) -> bool:
        if not self._directory.is_up or self._clock() < self._pause_until_s:
            return False
        return self._num_waiting < (1 if self._failed else MAX_WAITING)

    def _queries(self, work: PromptRequest) -> list[IndexQuery]:
        """None where the answer could change nothing."""
        sessions = self._sessions()
        if len(sessions) < 2 or work.sampling.skip_reading_prefix_cache:
            return []
        names = {session.scheduler_id for session in sessions}
        queries = []
        for block_size in {supported_block_size(session.view.layout) for session in sessions}:
            index = self._directory.index(block_size)
            if index is not None and work.num_prompt_tokens >= MIN_BLOCKS * block_size:
                workers = [worker for worker in index.workers if worker.scheduler in names]
                queries.append(IndexQuery(index.reader, block_size, workers))
        return [query for query in queries if query.workers]

    async def _within_budget(self, work: PromptRequest, queries: Seq[IndexQuery]) -> tuple[CachedTokens, str]:
        try:
            async with asyncio.timeout(BUDGET_S):
                await self._turns.acquire()
                cached = await asyncio.shield(self._ask_aside(work, queries))
        except TimeoutError:
            self._pause("no answer in time")
            return NO_CACHED_TOKENS, "timeout"
        except Exception as error:  # Redis may be away, and may hold anything
            self._pause(str(error) or repr(error))
            return NO_CACHED_TOKENS, "error"
        self._failed = False
        return cached, "hit" if cached else "miss"

    def _pause(self, reason: str) -> None:
        log.debug("no look-ups for a while", reason=reason)
        self._failed = True
        self._pause_until_s = self._clock() + PAUSE_S

    def _ask_aside(self, work: PromptRequest, queries: Seq[IndexQuery]) -> asyncio.Task[CachedTokens]:
        """In a task that goes on when nobody waits any more: cancelling it would cost the connection."""
        task = self._asking.start("prefix look-up", _ask(work, queries))
        task.add_done_callback(self._on_answer)
        return task

    def _on_answer(self, task: asyncio.Task[CachedTokens]) -> None:
        self._turns.release()
        if not task.cancelled():
            task.exception()  # seen, also where nobody waits any more

    async def close(self) -> None:
        await self._asking.close()


async def _ask(work: PromptRequest, queries: Seq[IndexQuery]) -> CachedTokens:
    cached: dict[str, int] = {}
    for reader, block_size, workers in queries:
        for match in await reader.match(work.hashes.block_hashes(block_size), workers):
            scheduler, num_tokens = match.worker.scheduler, match.num_blocks * block_size
            cached[scheduler] = max(cached.get(scheduler, 0), num_tokens)
    return cached
