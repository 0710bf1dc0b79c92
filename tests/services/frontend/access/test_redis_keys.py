"""API keys in a real Redis, next to malformed entries."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from quire.services.frontend.access.api_key import digest
from quire.services.frontend.access.sources import RedisKeys
from quire.shared.prefix_index import connect
from tests.redis_server import RedisServer

GOOD, GONE = digest(b"good"), digest(b"gone")
NO_KEYS = [
    b"",
    b"\xff\xfe",
    b"null",
    b"7",
    b"[]",
    b"{}",
    b"[" * 8_000 + b"]" * 8_000,
    json.dumps({"name": "x y"}).encode(),
    json.dumps({"name": "x", "admin": True}).encode(),
    b'{"name": "x", "requests_per_minute": ' + b"9" * 6_000 + b"}",
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


async def read(keys: RedisKeys) -> set[bytes]:
    await keys.reload()
    return set(keys.keys())


@pytest.mark.parametrize("value", NO_KEYS, ids=range(len(NO_KEYS)))
async def test_what_is_no_key_is_skipped_and_keys_can_be_taken_away(redis: Any, value: bytes) -> None:
    faults: list[None] = []
    keys = RedisKeys(redis, "quire", lambda: faults.append(None))
    for name in (GOOD, GONE):
        await redis.hset("quire:api_keys", name.hex(), json.dumps({"name": "a"}))
    assert await read(keys) == {GOOD, GONE}
    await redis.hset("quire:api_keys", digest(b"bad").hex(), value)
    await redis.hset("quire:api_keys", "no hexadecimal digits", json.dumps({"name": "b"}))
    await redis.hdel("quire:api_keys", GONE.hex())
    assert await read(keys) == {GOOD}
    assert len(faults) == 1


async def test_a_value_of_another_type_leaves_the_keys_from_before(redis: Any) -> None:
    faults: list[None] = []
    keys = RedisKeys(redis, "quire", lambda: faults.append(None))
    await redis.hset("quire:api_keys", GOOD.hex(), json.dumps({"name": "a"}))
    assert await read(keys) == {GOOD}
    await redis.delete("quire:api_keys")
    await redis.set("quire:api_keys", "x")
    assert await read(keys) == {GOOD}
    assert len(faults) == 1
