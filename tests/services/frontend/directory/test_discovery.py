"""Discovered schedulers: found in Redis, dialled once, removed when they leave."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.composition.timing import FrontendTiming
from quire.services.frontend.scheduler_client.connection import ConnectionTiming
from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.redis_server import RedisServer
from tests.services.frontend.directory.published_caches import Published
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually, stays

FORGET_AFTER_S = 0.3
TIMING = FrontendTiming(connections=ConnectionTiming(forget_after_s=FORGET_AFTER_S), registry_poll_s=0.05)

COUNTING = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(max_tokens=40, seed=3, temperature=1))
COUNTED = [(3 + i) % 200 for i in range(40)]


def named(name: str, **view: Any) -> ScriptedScheduler:
    script = ScriptedScheduler(count_up, **view)
    script.scheduler_id = name
    return script


async def counted(frontend: Running) -> list[int]:
    return [token async for message in frontend.inference.Generate(COUNTING) for token in message.token_ids]


async def statuses(frontend: Running) -> list[tuple[str, int]]:
    """Returns (address, state) of each known scheduler."""
    services = (await frontend.admin.GetStatus(admin_pb2.GetStatusRequest())).services
    return [(s.address, s.state) for s in services if s.role == admin_pb2.ROLE_SCHEDULER]


async def metric(frontend: Running, name: str) -> float:
    return (await frontend.metrics())[f"quire_frontend_{name}"]


async def until_metric(frontend: Running, name: str, value: float) -> None:
    await eventually(lambda: metric(frontend, name), lambda found: found == value)


async def until_all_rest(frontend: Running) -> None:
    """Waits until each address has a session or is known to belong to a connected scheduler."""
    await eventually(
        lambda: (
            frontend.frontend.core.client.is_open
            and (not frontend.frontend.core.client.connections.reconnect_attempts())
        )
    )


async def test_a_second_scheduler_is_found_and_used(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    one, two = named("one", num_waiting_tokens=1000), named("two")
    async with scheduler(one), running(folder, one.address, redis=redis_server.url, timing=TIMING) as frontend:
        assert await counted(frontend) == COUNTED
        async with scheduler(two):
            await published.lists(two)
            await until_metric(frontend, "sessions_open", 2)
            assert await counted(frontend) == COUNTED
            assert sorted(await statuses(frontend)) == sorted(
                [(one.address, admin_pb2.STATE_READY), (two.address, admin_pb2.STATE_READY)]
            )
            assert await metric(frontend, "redis_up") == 1
    assert (len(one.submissions), len(two.submissions)) == (1, 1)


async def test_discovery_alone_is_enough(folder: Path, redis_server: RedisServer, published: Published) -> None:
    async with scheduler(named("only")) as only:
        await published.lists(only)
        async with running(folder, redis=redis_server.url, timing=TIMING) as frontend:
            assert await counted(frontend) == COUNTED


async def test_other_namespaces_are_not_looked_at(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    async with scheduler(named("one")) as one, scheduler(named("other")) as other:
        await published.lists(other)
        settings = {"redis": redis_server.url, "redis_namespace": "mine"}
        async with running(folder, one.address, timing=TIMING, **settings) as frontend:
            await until_metric(frontend, "redis_up", 1)
            await stays(lambda: not other.hellos, 0.2)  # several more rounds
            assert await metric(frontend, "sessions_open") == 1
    assert other.hellos == []


async def test_a_scheduler_with_two_addresses_has_one_session(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    async with scheduler(named("one")) as one:
        alias = one.address.replace("127.0.0.1", "localhost")
        async with running(folder, alias, redis=redis_server.url, timing=TIMING) as frontend:
            await published.lists(one)
            await stays(lambda: len(one.hellos) == 1, 0.3)
            one.break_sessions()  # both addresses are dialled, one session stays
            await one.until(lambda: len(one.hellos) >= 2)
            await until_all_rest(frontend)
            num_hellos = len(one.hellos)
            assert await counted(frontend) == COUNTED
            assert len(await statuses(frontend)) == 1
            # It waits instead of reconnecting.
            await stays(lambda: (len(one.sessions), len(one.hellos)) == (1, num_hellos), 0.5)


async def test_two_lives_of_a_scheduler_are_two_sessions(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    """A scheduler restarted at another address while the old address still answers."""
    before, after = named("same"), named("same")
    async with (
        scheduler(before),
        scheduler(after),
        running(folder, before.address, redis=redis_server.url, timing=TIMING),
    ):
        await published.lists(after)
        await after.until(lambda: after.sessions)
        assert before.sessions


async def test_an_entry_that_ends_costs_no_session_and_a_dead_scheduler_is_forgotten(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    one, two = named("one"), named("two")
    async with scheduler(one), running(folder, one.address, redis=redis_server.url, timing=TIMING) as frontend:
        async with scheduler(two):
            await published.lists(two)
            await two.until(lambda: two.sessions)
            await published.lists(two, lease_ms=1)
            await stays(lambda: len(two.hellos) == 1, 1)
            assert (await metric(frontend, "sessions_open"), len(two.hellos)) == (2, 1)
        await eventually(lambda: statuses(frontend), lambda found: found == [(one.address, admin_pb2.STATE_READY)])
        assert await counted(frontend) == COUNTED


async def test_a_configured_scheduler_is_never_forgotten(folder: Path, redis_server: RedisServer) -> None:
    only = named("only")
    async with contextlib.AsyncExitStack() as first_life:
        await first_life.enter_async_context(scheduler(only))
        async with running(folder, only.address, redis=redis_server.url, timing=TIMING) as frontend:
            await first_life.aclose()
            await asyncio.sleep(2 * FORGET_AFTER_S)
            await eventually(lambda: statuses(frontend), lambda found: found == [(only.address, admin_pb2.STATE_DOWN)])
            async with scheduler(only, int(only.address.rpartition(":")[2])):
                assert await counted(frontend) == COUNTED


async def test_a_scheduler_of_another_model_is_left_alone(
    folder: Path, redis_server: RedisServer, published: Published, caplog: pytest.LogCaptureFixture
) -> None:
    one, stranger = named("one"), named("stranger")
    stranger.reject_hello = "model.name: frontend f has 'tiny', scheduler s has 'b'"
    async with (
        scheduler(one),
        scheduler(stranger),
        running(folder, one.address, redis=redis_server.url, timing=TIMING) as frontend,
    ):
        await published.lists(stranger)
        await stranger.until(lambda: stranger.hellos)
        await eventually(lambda: "ignoring a discovered scheduler" in caplog.text)
        await stays(lambda: len(stranger.hellos) == 1, 0.5)
        assert await counted(frontend) == COUNTED
        assert caplog.text.count("ignoring a discovered scheduler") == 1
        stranger.reject_hello = None
        stranger.epoch += 1000  # restarted, with another model
        await published.lists(stranger)
        await stranger.until(lambda: stranger.sessions)


@pytest.mark.parametrize("trouble", ["stop", "hang", "no set"])
async def test_whatever_redis_does_what_is_known_stays_known(
    folder: Path,
    redis_server: RedisServer,
    published: Published,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    caplog.set_level("INFO", logger="quire.directory")
    one, two = named("one"), named("two")
    async with scheduler(one), scheduler(two):
        await published.lists(two)
        async with running(folder, one.address, redis=redis_server.url, timing=TIMING) as frontend:
            await two.until(lambda: two.sessions)
            if trouble == "no set":
                await published.redis.set("{quire}:schedulers", b"of another type")
            else:
                getattr(redis_server, trouble)()
            await until_metric(frontend, "redis_up", 0)
            await stays(lambda: frontend.num_usable_sessions == 2, 0.5)
            assert await counted(frontend) == COUNTED
            assert await metric(frontend, "sessions_open") == 2
            two.break_sessions()
            await two.until(lambda: len(two.hellos) == 2 and two.sessions)
            if trouble == "stop":
                redis_server.start()
                await published.until_it_answers()
            redis_server.resume()
            if trouble == "no set":
                await published.redis.delete("{quire}:schedulers")
            await published.lists(two)
            await until_metric(frontend, "redis_up", 1)
            assert await metric(frontend, "sessions_open") == 2
    assert caplog.text.count("Redis is unavailable") == 1
    assert caplog.text.count("Redis is available") == 2


async def test_redis_that_comes_later_is_noticed(folder: Path, redis_server: RedisServer, published: Published) -> None:
    redis_server.stop()
    async with (
        scheduler(named("one")) as one,
        running(folder, one.address, redis=redis_server.url, timing=TIMING) as frontend,
    ):
        assert await counted(frontend) == COUNTED
        assert await metric(frontend, "redis_up") == 0
        redis_server.start()
        async with scheduler(named("two")) as two:
            await published.lists(two)
            await two.until(lambda: two.sessions)


async def test_a_url_of_no_known_kind_is_a_start_up_error(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="redis: unsupported URL 'http://x'"):
        async with running(folder, redis="http://x", timing=TIMING):
            pass


async def test_malformed_entries_are_counted_and_the_good_ones_are_used(
    folder: Path, redis_server: RedisServer, published: Published
) -> None:
    async with scheduler(named("good")) as good:
        await published.redis.sadd("{quire}:schedulers", "bad", b"\xff")
        await published.redis.set("{quire}:scheduler:bad", b'{"address": 7}')
        await published.lists(good)
        async with running(folder, redis=redis_server.url, timing=TIMING) as frontend:
            assert await counted(frontend) == COUNTED
            assert await metric(frontend, "redis_up") == 1
            assert await metric(frontend, "redis_malformed_entries_total{kind=scheduler}") >= 2
