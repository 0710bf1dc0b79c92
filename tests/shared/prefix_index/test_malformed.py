"""Malformed entries in a real Redis are skipped and counted, and the others are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from quire.shared.prefix_index import (
    BlockKeys,
    MalformedEntries,
    PrefixReader,
    RegistryKeys,
    RegistryReader,
    SchedulerEntry,
    WorkerEntry,
    connect,
)
from tests.redis_server import RedisServer

REGISTRY, BLOCKS = RegistryKeys("quire"), BlockKeys("{quire:model:fingerprint:16}")
SCHEDULER = {"address": "127.0.0.1:1", "epoch": 7, "num_workers": 2}
WORKER = {"epoch": 7, "scheduler": "s"}
DEEP = b"[" * 8_000 + b"]" * 8_000

OF_ANY_KIND = [
    b"",
    b"\xff\xfe",
    b"not json",
    b"null",
    b"7",
    b'["address"]',
    b"{",
    b"{}",
    DEEP,
    b'{"epoch": ' + b"9" * 6_000 + b"}",  # more digits than int() takes
    json.dumps(SCHEDULER | WORKER | {"x": "a" * 20_000}).encode(),
]
SCHEDULERS = [
    {"address": None},
    {"address": ["127.0.0.1:1"]},
    {"address": ""},
    {"epoch": "7"},
    {"epoch": -1},
    {"epoch": True},
    {"epoch": 1e30},
    {"num_workers": float("nan")},
    {"num_workers": 2**80},
]
WORKERS = [
    {"epoch": None},
    {"scheduler": 7},
    {"block_size": 0, "windows": [16]},
    {"block_size": "16", "windows": [16]},
    {"windows": "16"},
    {"windows": [-1]},
    {"windows": [None]},
    {"windows": [1] * 65},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    running = RedisServer(tmp_path_factory.mktemp("redis"))
    running.start()
    yield running
    running.stop()


@pytest_asyncio.fixture
async def redis(server: RedisServer) -> AsyncIterator[Any]:
    client = connect(server.url, 60.0)
    await client.flushall()
    yield client
    await client.aclose()


def encoded(good: dict[str, Any], bad: list[dict[str, Any]]) -> list[bytes]:
    return OF_ANY_KIND + [json.dumps(good | change).encode() for change in bad]


@pytest.mark.parametrize("value", encoded(SCHEDULER, SCHEDULERS))
async def test_a_scheduler_that_cannot_be_read_is_skipped(redis: Any, value: bytes) -> None:
    counts: Counter[str] = Counter()
    await redis.sadd(REGISTRY.schedulers, "bad", "good")
    await redis.set(REGISTRY.scheduler("bad"), value)
    await redis.set(REGISTRY.scheduler("good"), json.dumps(SCHEDULER))
    reader = RegistryReader(redis, REGISTRY, MalformedEntries(lambda kind: counts.update([kind])))
    assert await reader.schedulers() == [SchedulerEntry("good", "127.0.0.1:1", 7, 2)]
    assert counts == {"scheduler": 1}


@pytest.mark.parametrize("value", encoded(WORKER, WORKERS))
async def test_a_worker_that_cannot_be_read_is_skipped(redis: Any, value: bytes) -> None:
    counts: Counter[str] = Counter()
    await redis.sadd(BLOCKS.workers, "bad", "good")
    await redis.set(BLOCKS.worker("bad"), value)
    await redis.set(BLOCKS.worker("good"), json.dumps(WORKER))
    reader = PrefixReader(redis, BLOCKS, MalformedEntries(lambda kind: counts.update([kind])))
    assert await reader.workers() == [WorkerEntry("good", 7, "s")]
    assert counts == {"worker": 1}


@pytest.mark.parametrize("name", [b"", b"\xff\xfe", b"a" * 257])
async def test_an_id_that_cannot_be_read_is_skipped(redis: Any, name: bytes) -> None:
    counts: Counter[str] = Counter()
    await redis.sadd(REGISTRY.schedulers, name, "good")
    await redis.set(REGISTRY.scheduler("good"), json.dumps(SCHEDULER))
    reader = RegistryReader(redis, REGISTRY, MalformedEntries(lambda kind: counts.update([kind])))
    assert [entry.id for entry in await reader.schedulers()] == ["good"]
    assert counts == {"scheduler": 1}


async def test_a_key_of_another_type_is_an_entry_that_has_expired(redis: Any) -> None:
    await redis.sadd(REGISTRY.schedulers, "bad")
    await redis.sadd(REGISTRY.scheduler("bad"), "not a string")
    assert await RegistryReader(redis, REGISTRY).schedulers() == []


async def test_one_line_a_minute_says_so_without_a_traceback(redis: Any, caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 0.0, 1.0, 1.0, 59.0, 59.0, 60.0, 60.0, 61.0, 61.0))  # two entries at each reading
    await redis.sadd(REGISTRY.schedulers, "bad", "worse")
    await redis.mset({REGISTRY.scheduler("bad"): b"{", REGISTRY.scheduler("worse"): b"7"})
    reader = RegistryReader(redis, REGISTRY, MalformedEntries(lambda _: None, lambda: next(times)))
    for _ in range(5):
        assert await reader.schedulers() == []
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert [record.exc_info for record in caplog.records] == [None, None]
    assert [record.values["suppressed_since_last_line"] for record in caplog.records] == [0, 5]
