"""Streams of one frontend that are read, ended and gone on with at another, through a real Redis."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from quire.services.frontend.streams.redis_store import LEAVE
from quire.shared.errors import NotFound
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.security import secret_file
from tests.redis_server import RedisServer
from tests.services.frontend.running import running
from tests.services.frontend.streams.pair import Pair, paired
from tests.services.frontend.streams.reading import (
    asked,
    attach,
    bare,
    everything,
    first,
    offsets,
    refusal,
    text,
    tokens,
)
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(tmp_path_factory.mktemp("redis"), tcp=True)
    started.start()
    yield started
    started.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path, server: RedisServer) -> AsyncIterator[Pair]:
    async with paired(folder, server) as found:
        yield found


async def test_a_stream_is_read_at_any_frontend_while_it_is_made_and_afterwards(pair: Pair) -> None:
    call = pair.a.inference.Generate(asked("live"))
    elsewhere = asyncio.create_task(bare(attach(pair.b, "live", 2))) if await first(call, 1) else None
    assert elsewhere is not None
    whole = await bare(attach(pair.a, "live"))
    assert offsets(whole) == list(range(len(whole)))
    assert await elsewhere == whole[2:]
    for offset in range(len(whole) + 1):
        assert await bare(attach(pair.b, "live", offset)) == whole[offset:]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"n": 2, "logprobs": 2, "temperature": 0.5, "prompt_logprobs": 1},
        {"stop": ["nobody says that", "neither this"], "temperature": 0},
        {"n": 2, "seed": None},
    ],
    ids=["seeded", "samples with log-probabilities", "stop strings", "unseeded"],
)
async def test_whoever_reads_goes_on_with_what_a_dead_frontend_has_left(pair: Pair, sampling: dict[str, Any]) -> None:
    """After any number of messages: none is lost, none comes twice, and the text is the undisturbed one."""
    for num_before in (1, 7):
        request = asked(f"dead-{next(NUMBERS)}", **{k: v for k, v in sampling.items() if v is not None})
        if "seed" in sampling:
            request.sampling.ClearField("seed")
        before = await pair.begun(pair.a.inference.Generate(request), num_before)
        await pair.kill_maker(request.options.request_id)
        seed = pair.last_seed
        after = await bare(attach(pair.b, request.options.request_id, num_before))
        assert pair.last_seed == seed
        found = [*before, *after]
        assert offsets(found) == list(range(len(found)))
        assert await bare(attach(pair.b, request.options.request_id)) == found
        request.options.request_id += "-undisturbed"
        request.sampling.seed = seed
        whole = await everything(pair.a.inference.Generate(request))
        for sample in range(request.sampling.n or 1):
            again = [message for message in found if message.index == sample]
            once = [message for message in whole if message.index == sample]
            assert (tokens(again), text(again)) == (tokens(once), text(once))
            assert [entry for m in again for entry in m.logprobs] == [entry for m in once for entry in m.logprobs]
            assert [e for m in again for e in m.prompt_logprobs] == [e for m in once for e in m.prompt_logprobs]
            assert again[-1].finish_reason == once[-1].finish_reason == finish_pb2.FINISH_REASON_LENGTH
            assert again[-1].usage.completion_tokens == once[-1].usage.completion_tokens
    told = await pair.b.metrics()
    assert told["quire_frontend_stream_takeovers_total"] >= 2
    assert told["quire_frontend_streams_ended_total{reason=finished}"] == told["quire_frontend_stream_takeovers_total"]


async def test_readers_of_a_stream_whose_maker_dies_go_on_without_a_word(pair: Pair) -> None:
    before = await pair.begun(pair.a.inference.Generate(asked("watched", max_tokens=60)), 3)
    readers = [asyncio.create_task(bare(attach(pair.b, "watched"))) for _ in range(2)]
    await first(attach(pair.b, "watched"), 3)
    await pair.kill_maker("watched")
    one, other = await asyncio.gather(*readers)
    assert one == other
    assert one[:3] == before
    assert len(tokens(one)) == 60


async def test_a_frontend_that_leaves_hands_its_streams_over(pair: Pair, folder: Path) -> None:
    settings: dict[str, Any] = {"redis": pair.redis.url, "drain_timeout_s": 0.01}
    async with running(folder, pair.script.address, **settings) as leaving:
        before = await first(leaving.inference.Generate(asked("handed", max_tokens=100)), 3)
    with pair.ask_redis() as client:
        assert not client.keys("*:lease:handed")
    after = await bare(attach(pair.b, "handed", 3))
    assert len(tokens([*before, *after])) == 100


async def test_a_maker_that_stood_still_gives_way_to_the_one_that_took_over(pair: Pair) -> None:
    """It has not died after all: its readers go on with what the other makes."""
    pair.script.pause()
    submissions = pair.script.submissions
    num_before = len(submissions)
    call = pair.a.inference.Generate(asked("still", max_tokens=50))
    with pair.ask_redis() as client:
        leases = await eventually(lambda: client.keys("*:lease:still"))
        holder = client.get(leases[0]) or b""
        await pair.script.until(lambda: len(submissions) == num_before + 1)
        reader = asyncio.create_task(bare(attach(pair.b, "still")))

        def is_taken_over() -> bool:
            """It may renew its lease before the other looks."""
            client.eval(LEAVE, 1, leases[0], holder)
            return len(submissions) >= num_before + 2

        await eventually(is_taken_over)
    pair.script.resume()
    own = await everything(call)
    assert own == await reader
    assert len(tokens(own)) == 50
    await pair.script.until(lambda: not pair.script.num_running)


async def test_a_redis_that_comes_back_with_an_old_state_costs_nothing(pair: Pair) -> None:
    """The log lacks entries that readers have seen: who makes the stream keeps them anew."""
    before = await pair.begun(pair.a.inference.Generate(asked("old", max_tokens=100)), 5)
    with pair.ask_redis() as client:
        client.ltrim(client.keys("*:log:old")[0], 0, 1)
    pair.script.resume()
    found = await bare(attach(pair.b, "old"))
    assert found[:5] == before
    assert offsets(found) == list(range(len(found)))
    assert len(tokens(found)) == 100


async def test_any_frontend_ends_a_stream(pair: Pair) -> None:
    await first(pair.a.inference.Generate(asked("ended", max_tokens=400)), 1)
    await pair.b.inference.Cancel(pb.CancelRequest(request_id="ended"))
    found = await bare(attach(pair.b, "ended"))
    assert found[-1].finish_reason == finish_pb2.FINISH_REASON_CANCELLED
    assert (await refusal(pair.b.inference.Cancel(pb.CancelRequest(request_id="none")))).code() == (
        grpc.StatusCode.NOT_FOUND
    )


async def test_ids_tenants_and_bounds_are_those_of_the_cluster(pair: Pair, folder: Path) -> None:
    await first(pair.a.inference.Generate(asked("one", tenant="t")), 1)
    refused = await refusal(pair.b.inference.Generate(asked("one", tenant="t")))
    assert refused.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert (await refusal(attach(pair.b, "one", tenant="u"))).code() == grpc.StatusCode.NOT_FOUND
    settings: dict[str, Any] = {"redis": pair.redis.url, "stream_limits": {"per_tenant": 1}}
    async with running(folder, pair.script.address, **settings) as strict:
        refused = await refusal(strict.inference.Generate(asked("two", tenant="t")))
        assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("limits", "tenants", "said"),
    [
        ({"all_tenants": 2}, "tu", "all tenants together all_tenants=2 streams that run or are kept"),
        ({"kept_bytes": 300}, "t", "all tenants together kept_bytes=300 of messages and requests that are kept"),
    ],
)
async def test_all_tenants_together_have_only_so_much_of_redis(
    folder: Path, server: RedisServer, limits: dict[str, int], tenants: str, said: str
) -> None:
    """At all frontends; what is deleted, or not begun, counts no longer; a stream that is there is never refused."""
    async with paired(folder, server, stream_limits=limits, redis_namespace=f"n{next(NUMBERS)}") as pair:
        for frontend, tenant in zip((pair.a, pair.b), tenants, strict=False):
            await everything(frontend.inference.Generate(asked("kept", tenant=tenant)))
            await frontend.frontend.core.streams.heartbeat()
        refused = await refusal(pair.b.inference.Generate(asked("kept", tenant="v")))
        assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert said in (refused.details() or "")
        again = await refusal(pair.b.inference.Generate(asked("kept", tenant="t")))
        assert again.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert offsets(await bare(attach(pair.b, "kept", tenant="t")))[0] == 0
        await pair.b.frontend.core.streams.heartbeat()
        before = await pair.b.metrics()
        assert before["quire_frontend_streams_kept"] == len(tenants)
        assert before["quire_frontend_stream_kept_bytes"] >= 300
        assert before["quire_frontend_streams_refused_total{reason=full}"] == 1
        for tenant in tenants:
            streams = pair.a.frontend.core.streams
            stream = await streams.find(tenant, "kept")
            await streams.refresh(stream)
            await streams.delete(stream)
        await pair.a.frontend.core.streams.heartbeat()
        after = await pair.a.metrics()
        assert (after["quire_frontend_streams_kept"], after["quire_frontend_stream_kept_bytes"]) == (0, 0)
        assert await everything(pair.b.inference.Generate(asked("kept", tenant="v")))


async def test_several_who_look_for_what_another_frontend_has_deleted_find_nothing(pair: Pair) -> None:
    await everything(pair.a.inference.Generate(asked("gone", tenant="t")))
    stream = await pair.b.frontend.core.streams.find("t", "gone")
    await pair.b.frontend.core.streams.refresh(stream)
    await pair.b.frontend.core.streams.delete(stream)
    looking = [pair.a.frontend.core.streams.find("t", "gone") for _ in range(8)]
    found = await asyncio.gather(*looking, return_exceptions=True)
    assert {type(one) for one in found} == {NotFound}


async def test_the_use_of_redis_is_told_anew_to_one_that_comes_back_empty(folder: Path, server: RedisServer) -> None:
    async with paired(folder, server, redis_namespace=f"n{next(NUMBERS)}") as pair:
        await first(pair.a.inference.Generate(asked("told", max_tokens=400)), 1)
        pair.script.pause()
        await pair.a.until_caught_up(pair.script)
        streams = pair.a.frontend.core.streams
        (made,) = streams.local.values()
        await eventually(lambda: not pair.a.has_unread_output and (not made.producer._store_lock.locked()))
        await streams.heartbeat()
        told = await pair.a.metrics()
        with pair.ask_redis() as client:
            client.flushall()
        await streams.heartbeat()
        again = await pair.a.metrics()
        for name in ("quire_frontend_streams_kept", "quire_frontend_stream_kept_bytes"):
            assert again[name] == told[name] > 0
        pair.script.resume()


async def test_a_request_with_the_id_of_a_stream_that_is_read_here_takes_it_from_no_reader(pair: Pair) -> None:
    begun = pair.a.inference.Generate(asked("twice", max_tokens=200))
    told = [await begun.read()]
    pair.script.pause()
    elsewhere = asyncio.create_task(bare(attach(pair.b, "twice")))
    await eventually(lambda: any(stream.num_readers for stream in pair.b.frontend.core.streams.known.values()))
    refused = await refusal(pair.b.inference.Generate(asked("twice")))
    assert refused.code() == grpc.StatusCode.FAILED_PRECONDITION
    pair.script.resume()
    async with asyncio.timeout(60):
        while (message := await begun.read()) is not grpc.aio.EOF:
            told.append(message)
        assert tokens(await elsewhere) == tokens(told)


async def test_a_stream_goes_on_as_its_key_s_own(folder: Path, server: RedisServer, tmp_path: Path) -> None:
    """With the tenant and the salt of the key that began it; with another key it is not there."""
    keys = tmp_path / "keys.yaml"
    entries = [{"name": name, "key": f"sk-{name}", "tenant": f"of-{name}"} for name in ("one", "other")]
    secret_file.write(keys, json.dumps({"keys": entries}))
    async with paired(folder, server, api_keys=str(keys)) as pair:
        own, other = ((("authorization", f"Bearer sk-{name}"),) for name in ("one", "other"))
        before = await pair.begun(pair.a.inference.Generate(asked("keyed", max_tokens=60), metadata=own), 3)
        await pair.kill_maker("keyed")
        assert (await refusal(attach(pair.b, "keyed", metadata=other))).code() == grpc.StatusCode.NOT_FOUND
        after = await bare(attach(pair.b, "keyed", 3, metadata=own))
        assert len(tokens([*before, *after])) == 60
        one, again = pair.script.submissions
        await pair.begun(pair.a.inference.Generate(asked("withdrawn", max_tokens=60), metadata=own), 3)
        await pair.kill_maker("withdrawn")
        secret_file.write(keys, json.dumps({"keys": [{**entries[1], "tenant": "of-one"}]}))
        refused = await refusal(attach(pair.b, "withdrawn", metadata=other))
        assert refused.code() == grpc.StatusCode.PERMISSION_DENIED
        assert "the API key one" in (refused.details() or "")
        assert (again.tenant, again.root_hash) == (one.tenant, one.root_hash) == ("of-one", one.root_hash)


async def test_what_redis_keeps_expires(pair: Pair) -> None:
    await everything(pair.a.inference.Generate(asked("expires", retention_s=100)))
    with pair.ask_redis() as client:
        left_ms = {key.decode().split(":")[-2]: client.pttl(key) for key in client.keys("*:expires")}
        assert left_ms.keys() >= {"request", "log"}
        assert all(0 < left <= 100_000 for left in left_ms.values())
        client.delete(*client.keys("*:expires"))
    await pair.a.frontend.core.streams.heartbeat()
    assert (await refusal(attach(pair.b, "expires"))).code() == grpc.StatusCode.NOT_FOUND


async def test_redis_away_costs_what_can_be_attached_and_no_token(pair: Pair) -> None:
    """Last: it goes. Messages that are not kept say so by having no offset, until it is back, even empty."""
    found: list[Any] = []
    async for message in pair.a.inference.Generate(asked("away", max_tokens=60)):
        found.append(message)
        if len(found) == 1:
            pair.redis.stop()
        if offsets(found)[-1] is None and offsets(found).count(None) == 3:
            pair.script.pause()
            refused = await refusal(attach(pair.b, "away"))
            assert refused.code() == grpc.StatusCode.UNAVAILABLE
            assert "is unavailable" in (refused.details() or "")
            refused = await refusal(pair.b.inference.Generate(asked("new")))
            assert refused.code() == grpc.StatusCode.UNAVAILABLE
            pair.redis.start()
            await pair.a.frontend.core.streams.heartbeat()
            pair.script.resume()
    assert offsets(found)[0] == 0
    assert offsets(found)[-1] == len(found) - 1
    assert len(tokens(found)) == 60
    assert tokens(await bare(attach(pair.b, "away"))) == tokens(found)
    assert (await pair.a.metrics())["quire_frontend_streams_unkept_total"] == 1
    assert (await pair.b.metrics())["quire_frontend_streams_refused_total{reason=redis_away}"] == 2
