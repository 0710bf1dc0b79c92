"""Rate limits of a key hold over all frontends, as far as Redis synchronizes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from quire.services.frontend.access.account import DAY_S, Account
from quire.services.frontend.access.api_key import parse_key
from quire.services.frontend.access.shared_usage import SYNC_S, SharedUsage
from quire.shared.errors import ResourceExhausted
from tests.redis_server import RedisServer
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually

SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 3}


class Frontend:
    """The account of one frontend."""

    def __init__(self, server: RedisServer, **limits: int) -> None:
        self.key = parse_key({"name": "a", **limits}, "")
        self.account = Account(self.key, lambda: 0.0, lambda: 0.0)  # the local clock stands still, Redis' does not
        self.num_errors = 0
        client = redis.asyncio.Redis.from_url(server.url, socket_timeout=1.0)
        self.shared = SharedUsage(client, "quire", {"a": self.account}, self._on_error)

    def _on_error(self) -> None:
        self.num_errors += 1

    def enter(self, count: int = 1) -> int:
        """Returns how many requests are admitted."""
        for number in range(count):
            try:
                self.account.admit_request(self.key)
            except ResourceExhausted:
                return number
        return count


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    started = RedisServer(tmp_path)
    started.start()
    yield started
    started.stop()


@pytest.fixture
async def frontends(server: RedisServer, request: pytest.FixtureRequest) -> AsyncIterator[list[Frontend]]:
    made = [Frontend(server, **request.param) for _ in range(3)]
    yield made
    for frontend in made:
        await frontend.shared.close()


@pytest.mark.parametrize("frontends", [{"requests_per_minute": 10}], indirect=True)
async def test_requests_count_wherever_they_come_in(frontends: list[Frontend]) -> None:
    first, second, third = frontends
    assert first.enter(6) == 6
    await first.shared.sync()
    await second.shared.sync()
    assert second.enter(10) == 4
    await second.shared.sync()
    await third.shared.sync()
    assert third.enter() == 0, "a frontend that has just started reads the shared usage"


@pytest.mark.parametrize("frontends", [{"tokens_per_minute": 1000, "tokens_per_day": 1500}], indirect=True)
async def test_tokens_count_wherever_they_are_used(frontends: list[Frontend]) -> None:
    first, second, _ = frontends
    for frontend in (first, second):
        assert frontend.enter() == 1
        frontend.account.charge(600)
        await frontend.shared.sync()
    with pytest.raises(ResourceExhausted, match="tokens_per_minute"):
        second.account.admit_request(second.key)
    assert first.enter() == 1, "the shared usage has not arrived yet"
    await first.shared.sync()
    with pytest.raises(ResourceExhausted, match="tokens_per_minute"):
        first.account.admit_request(first.key)


@pytest.mark.parametrize("frontends", [{"tokens_per_day": 1000}], indirect=True)
async def test_a_day_counts_over_restarts(frontends: list[Frontend]) -> None:
    first, second, _ = frontends
    day = (await first.shared.redis.time())[0] // DAY_S * DAY_S
    for frontend in (first, second):
        frontend.account = Account(frontend.key, lambda: 0.0, lambda: day)
        frontend.shared.accounts = {"a": frontend.account}
    first.account.charge(1000)
    await first.shared.sync()
    await second.shared.sync()
    with pytest.raises(ResourceExhausted, match="tokens_per_day"):
        second.account.admit_request(second.key)


@pytest.mark.parametrize("frontends", [{"requests_per_minute": 10}], indirect=True)
async def test_without_redis_each_frontend_counts_alone_and_reports_later(
    frontends: list[Frontend], server: RedisServer
) -> None:
    first, second, _ = frontends
    server.stop()
    assert first.enter(7) == 7
    await first.shared.sync()
    assert first.num_errors == 1
    assert first.enter(7) == 3, "the local limit still applies"
    server.start()
    await first.shared.sync()
    await second.shared.sync()
    assert second.enter() == 0
    assert first.num_errors == 1


async def _use(server: RedisServer) -> dict[bytes, bytes]:
    client = redis.asyncio.Redis.from_url(server.url)
    found: Any = await client.hgetall("quire:use:a")
    await client.aclose()
    return dict(found)


async def test_two_frontends_keep_one_rate(folder: Path, tmp_path: Path, server: RedisServer) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": "a", "key": "sk-a", "requests_per_minute": 4}]}))
    keys.chmod(0o600)
    settings = {"api_keys": str(keys), "redis": server.url}
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, **settings) as first,
        running(folder, script.address, **settings) as second,
    ):

        async def status(frontend: Running) -> int:
            headers = {"authorization": "Bearer sk-a"}
            return (await frontend.http.post("/v1/completions", json=SHORT, headers=headers)).status_code

        assert [await status(first) for _ in range(4)] == [200] * 4
        assert await status(second) == 200  # not synchronized with the other frontend yet
        async with asyncio.timeout(60):
            await eventually(  # reported by both; refilled by one per 15 s
                lambda: _use(server), lambda use: float(use.get(b"requests", b"4")) <= -0.5
            )
            while await status(second) == 200:
                await asyncio.sleep(3 * SYNC_S)  # synchronized by then
        assert float((await _use(server))[b"requests"]) > -3.5, (
            "it continued with the shared remainder, not with its own"
        )


@pytest.mark.parametrize("frontends", [{"requests_per_minute": 10, "tokens_per_minute": 1000}], indirect=True)
async def test_a_clock_of_redis_that_is_set_back_takes_nothing_away(
    server: RedisServer, frontends: list[Frontend]
) -> None:
    first, second, _ = frontends
    assert first.enter(3) == 3
    await first.shared.sync()
    async with redis.asyncio.Redis.from_url(server.url) as direct:
        seen = float(await direct.hget("quire:use:a", "seen"))
        await direct.hset("quire:use:a", "seen", str(seen + DAY_S))  # written while the clock was a day ahead
    await second.shared.sync()
    assert second.enter(10) == 7, "a clock that was a day ahead must not block every call"
