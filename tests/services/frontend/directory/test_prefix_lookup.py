"""Requests go where their prompt is cached, and never wait long for the lookup."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from quire.services.frontend.composition.timing import FrontendTiming
from quire.services.frontend.directory import directory
from quire.services.frontend.directory.prefix_lookup import MAX_AT_ONCE, MAX_WAITING, LookupTiming, PrefixLookup
from quire.services.frontend.scheduler_client.sequence import PromptHashes, PromptRequest
from quire.shared.columns import i32_bytes
from quire.shared.kv import block_hash
from quire.shared.metrics.frontend import LOOKUP_OUTCOMES, FrontendMetrics
from quire.shared.pb.common.v1 import model_pb2, sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.prefix_index import WorkerEntry, WorkerMatch
from tests.observing import calls_of
from tests.redis_server import RedisServer
from tests.services.frontend.directory.published_caches import BLOCK_SIZE, Published
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.waiting import eventually

PROMPT = [(7 * i) % 200 for i in range(330)]  # 20 full blocks


def asking(prompt: Sequence[int] = PROMPT, **sampling: Any) -> pb.GenerateRequest:
    params = sampling_pb2.SamplingParams(max_tokens=2, ignore_eos=True, **sampling)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=params)


async def run(frontend: Running, request: pb.GenerateRequest) -> int:
    return sum([len(message.token_ids) async for message in frontend.inference.Generate(request)])


async def outcomes(frontend: Running) -> dict[str, int]:
    metrics = await frontend.metrics()
    counts = {o: int(metrics[f"quire_frontend_prefix_lookups_total{{outcome={o}}}"]) for o in LOOKUP_OUTCOMES}
    return {outcome: count for outcome, count in counts.items() if count}


@dataclass
class Shards:
    """Two schedulers discovered in Redis, and a frontend that knows their workers."""

    one: ScriptedScheduler
    two: ScriptedScheduler
    frontend: Running

    @property
    def submissions(self) -> tuple[int, int]:
        return len(self.one.submissions), len(self.two.submissions)


USUAL = LookupTiming()
UNHURRIED = LookupTiming(budget_s=60.0)  # a busy machine may exceed the usual budget


@asynccontextmanager
async def shards(
    folder: Path,
    server: RedisServer,
    published: Published,
    *,
    blocks_of_two: int = 20,
    timing: LookupTiming = UNHURRIED,
    **view_of_two: Any,
) -> AsyncIterator[Shards]:
    one, two = ScriptedScheduler(), ScriptedScheduler(**view_of_two)
    often = FrontendTiming(registry_poll_s=0.1, prefix_lookup=timing)
    one.scheduler_id, two.scheduler_id = "one", "two"
    async with scheduler(one), scheduler(two):
        await published.lists(two)
        await published.holds(one, "worker-a", PROMPT, 1)
        await published.holds(two, "worker-b", PROMPT, 3)
        await published.holds(two, "worker-c", PROMPT, blocks_of_two)
        async with running(folder, one.address, redis=server.url, timing=often) as frontend:
            await frontend.until_sessions(2)
            index = frontend.frontend.redis.directory
            assert index is not None
            await eventually(lambda: (known := index.index(BLOCK_SIZE)) is not None and known.workers)
            yield Shards(one, two, frontend)


@pytest.mark.parametrize(
    ("waiting_there", "prompt", "goes_to"),
    [
        (200, PROMPT, "two"),  # backlog of 200 tokens, 320 cached
        (400, PROMPT, "one"),  # backlog of 400 tokens
        (200, PROMPT[: 8 * BLOCK_SIZE], "one"),  # at most 128 cached
        (200, PROMPT[1:], "one"),  # nothing cached
    ],
)
async def test_waiting_and_computing_are_weighed(
    folder: Path,
    redis_server: RedisServer,
    published: Published,
    waiting_there: int,
    prompt: Sequence[int],
    goes_to: str,
) -> None:
    async with shards(folder, redis_server, published, num_waiting_tokens=waiting_there) as cluster:
        assert await run(cluster.frontend, asking(prompt)) == 2
        assert cluster.submissions == ((1, 0) if goes_to == "one" else (0, 1))
        assert await outcomes(cluster.frontend) == {"miss" if prompt == PROMPT[1:] else "hit": 1}
        metrics = await cluster.frontend.metrics()
    assert metrics["quire_frontend_prefix_lookup_seconds_count"] == 1
    (submission,) = cluster.one.submissions + cluster.two.submissions
    chain = block_hash.chain(block_hash.root_hash(), i32_bytes(prompt), BLOCK_SIZE)
    assert submission.block_hashes == b"".join(chain)


async def test_a_burst_with_one_beginning_stays_together(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    """Tokens just submitted count as backlog without their cached part."""
    async with shards(folder, redis_server, published) as cluster:
        cluster.one.pause()
        cluster.two.pause()
        calls = [asyncio.create_task(run(cluster.frontend, asking())) for _ in range(12)]
        await cluster.two.until(lambda: len(cluster.two.submissions) == 12)
        cluster.two.resume()
        assert await asyncio.gather(*calls) == [2] * 12
    assert cluster.submissions == (0, 12)


async def test_no_lookup_is_made_if_it_cannot_change_the_placement(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    async with shards(folder, redis_server, published, num_running=1) as cluster:
        await run(cluster.frontend, asking(PROMPT[: 4 * BLOCK_SIZE - 1]))
        await run(cluster.frontend, asking(skip_reading_prefix_cache=True))
        cluster.two.set_view(draining=True)
        await cluster.frontend.until_sessions(1)
        await run(cluster.frontend, asking())
        assert cluster.submissions == (3, 0)
        assert await outcomes(cluster.frontend) == {"skipped": 3}


async def test_prompts_of_one_call_are_looked_up_together(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    async with shards(folder, redis_server, published, num_waiting_tokens=100) as cluster:
        body = {"prompt": [PROMPT, PROMPT[1:], PROMPT], "max_tokens": 2, "n": 2}
        assert (await cluster.frontend.http.post("/v1/completions", json=body)).status_code == 200
        assert cluster.submissions == (1, 2)
        assert await outcomes(cluster.frontend) == {"hit": 2, "miss": 1}


@pytest.mark.parametrize("trouble", ["hang", "stop"])
async def test_trouble_with_redis_costs_one_request_a_moment(
    folder: Path, redis_server: RedisServer, published: Published, trouble: str
) -> None:
    timing = LookupTiming(pause_s=60.0)  # however long the ten take
    async with shards(folder, redis_server, published, timing=timing, num_waiting_tokens=100) as cluster:
        getattr(redis_server, trouble)()
        took = []
        for _ in range(10):
            start = time.perf_counter()
            assert await run(cluster.frontend, asking()) == 2
            took.append(time.perf_counter() - start)
        seen = await outcomes(cluster.frontend)
        assert cluster.submissions == (10, 0)  # by load alone
        assert sorted(took)[-2] < 5, took
        assert seen.get("timeout", 0) + seen.get("error", 0) <= 1  # otherwise the directory notices the outage first
        assert seen["skipped"] >= 9


async def test_redis_that_comes_back_empty_is_asked_again(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    timing = LookupTiming(budget_s=60.0, pause_s=0.0)
    async with shards(folder, redis_server, published, timing=timing, num_waiting_tokens=100) as cluster:
        redis_server.stop()
        assert await run(cluster.frontend, asking()) == 2
        redis_server.start()
        await published.until_it_answers()
        assert await run(cluster.frontend, asking()) == 2
        assert cluster.submissions == (2, 0)
        # The preferred scheduler is published first: the frontend may read the registry between the two.
        for worker, script, num_blocks in (("worker-c", cluster.two, 20), ("worker-a", cluster.one, 1)):
            await published.holds(script, worker, PROMPT, num_blocks)
        async with asyncio.timeout(60):
            while not cluster.submissions[1]:  # the published caches are read periodically
                assert await run(cluster.frontend, asking()) == 2
        assert (await outcomes(cluster.frontend))["hit"] == 1


# The lookup alone, with a scripted index.


def opened() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class ScriptedReader:
    """Answers after `delay_s` once `open` is set, or raises."""

    delay_s: float = 0.0
    open: asyncio.Event = field(default_factory=opened)
    error: Exception | None = None
    num_asked: int = 0
    num_at_once: int = 0
    most_at_once: int = 0

    async def match(self, block_hashes: Sequence[bytes], workers: Sequence[WorkerEntry]) -> list[WorkerMatch]:
        self.num_asked += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(self.delay_s)
        await self.open.wait()
        self.num_at_once -= 1
        if self.error is not None:
            raise self.error
        return [WorkerMatch(workers[0], 5)]


@dataclass
class ScriptedDirectory:
    """Knows one worker of each of two schedulers."""

    reader: ScriptedReader
    is_up: bool = True

    def index(self, block_size: int) -> directory.PublishedCaches:
        return directory.PublishedCaches(self.reader, [WorkerEntry(f"w-{name}", 1, name) for name in "ab"])  # type: ignore[arg-type]


@dataclass
class ScriptedSession:
    """A session with a fixed view."""

    scheduler_id: str
    num_tokens_since_view: int = 0
    view: scheduler_pb2.ClusterView = field(
        default_factory=lambda: scheduler_pb2.ClusterView(
            num_workers=1, layout=model_pb2.BlockLayout(block_size=BLOCK_SIZE, hash_scheme=block_hash.SCHEME)
        )
    )


WORK = PromptRequest(
    request_id="r",
    prompt=i32_bytes(PROMPT),
    num_prompt_tokens=len(PROMPT),
    hashes=PromptHashes(block_hash.root_hash(), i32_bytes(PROMPT)),
    sampling=sampling_pb2.SamplingParams(max_tokens=1),
    eos_token_ids=b"",
    params=b"",
    priority=0,
    tenant="",
    arrival_s=0.0,
    deadline_s=None,
)


class Trial:
    """A lookup and its counted outcomes."""

    def __init__(self, reader: ScriptedReader, timing: LookupTiming = UNHURRIED) -> None:
        self.metrics = FrontendMetrics("m", 100)
        self.directory = ScriptedDirectory(reader)
        self.now_s = 1000.0
        sessions = [ScriptedSession("a"), ScriptedSession("b")]
        self.lookup = PrefixLookup(self.directory, lambda: sessions, self.metrics, lambda: self.now_s, timing)  # type: ignore[arg-type,return-value]

    async def ask(self, times: int = 1) -> None:
        await asyncio.gather(*(self.lookup.cached_tokens([WORK]) for _ in range(times)))

    @property
    def seen(self) -> dict[str, int]:
        counts = {outcome: int(counter._value.get()) for outcome, counter in self.metrics.prefix_lookups.items()}
        return {outcome: count for outcome, count in counts.items() if count}


async def test_what_a_schedulers_best_worker_holds_counts() -> None:
    trial = Trial(ScriptedReader())
    assert await trial.lookup.cached_tokens([WORK]) == [{"a": 5 * BLOCK_SIZE}]


async def test_a_slow_index_is_given_up_and_left_alone_for_a_while() -> None:
    reader = ScriptedReader()
    reader.open.clear()  # no caller waits for it
    trial = Trial(reader, LookupTiming(budget_s=1.0))
    await trial.ask()
    await trial.ask(20)
    assert (trial.seen, reader.num_asked) == ({"timeout": 1, "skipped": 20}, 1)
    trial.now_s += USUAL.pause_s
    await trial.ask(20)  # one lookup tries, the others are skipped
    assert (trial.seen, reader.num_asked) == ({"timeout": 2, "skipped": 39}, 2)
    reader.open.set()
    trial.now_s += USUAL.pause_s
    await trial.ask()
    await trial.ask(20)
    assert trial.seen == {"timeout": 2, "skipped": 39, "hit": 21}


@pytest.mark.parametrize("error", [redis.exceptions.ResponseError("WRONGTYPE"), OSError(5, "x"), KeyError("epoch")])
async def test_an_index_that_fails_is_left_alone_for_a_while(error: Exception) -> None:
    trial = Trial(ScriptedReader(error=error))
    await trial.ask()
    await trial.ask()
    assert trial.seen == {"error": 1, "skipped": 1}


async def test_a_crowd_is_bounded() -> None:
    reader = ScriptedReader(delay_s=0.005)
    trial = Trial(reader)
    await trial.ask(200)
    assert trial.seen == {"hit": MAX_WAITING, "skipped": 200 - MAX_WAITING}
    assert reader.most_at_once == MAX_AT_ONCE


async def test_a_request_that_is_cancelled_leaves_the_turn_to_others() -> None:
    reader = ScriptedReader(delay_s=0.01)
    trial = Trial(reader)
    for _ in range(2 * MAX_AT_ONCE):
        asked = asyncio.create_task(trial.ask())
        await asyncio.sleep(0.001)
        asked.cancel()
    await asyncio.sleep(0.05)
    await trial.ask()
    assert trial.seen["hit"] == 1
    await trial.lookup.close()


def test_hashes_are_computed_once_and_continued() -> None:
    chain, root = block_hash.chain, block_hash.root_hash(salt="s")
    hashes, output = PromptHashes(root, i32_bytes(PROMPT)), array("i", range(40))
    with calls_of(block_hash.chain) as calls:
        first, again = hashes.block_hashes(16), hashes.block_hashes(16)
        assert sum(len(call.result) for call in calls) == 20
        continued = hashes.block_hashes_with_output(16, output.tobytes())
        assert sum(len(call.result) for call in calls) == 23
    assert first == again == chain(root, i32_bytes(PROMPT), 16)
    assert continued == chain(root, i32_bytes([*PROMPT, *output]), 16)
    assert hashes.block_hashes_with_output(500, output.tobytes()) == []
    assert hashes.block_hashes_with_output(64, i32_bytes(range(300))) == chain(
        root, i32_bytes([*PROMPT, *range(300)]), 64
    )
