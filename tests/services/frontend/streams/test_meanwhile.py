"""Races: a stream changes while a read from Redis or a takeover is under way, and the answer is outdated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from quire.services.frontend.streams.store import StoreUnavailable, StreamKey, StreamUpdate
from quire.services.frontend.streams.streams import Streams
from quire.shared.errors import Unavailable
from tests.services.frontend.streams.pair import Pair
from tests.services.frontend.streams.reading import asked, attach, bare, everything, offsets, refusal, tokens
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


def streams_of(frontend: Any) -> Streams:
    found: Streams = frontend.frontend.core.streams
    return found


async def until_made(streams: Streams, key: StreamKey) -> None:
    await eventually(lambda: key in streams.local)


async def test_a_late_not_found_does_not_drop_a_stream_started_since(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, looked, begun = streams_of(pair.a), asyncio.Event(), asyncio.Event()
    ask = streams.store.request

    async def late(key: StreamKey) -> bytes | None:
        found = await ask(key)
        looked.set()
        await begun.wait()
        return found

    monkeypatch.setattr(streams.store, "request", late)
    early = asyncio.create_task(refusal(attach(pair.a, "early")))
    await looked.wait()
    pair.script.pause()
    making = asyncio.create_task(everything(pair.a.inference.Generate(asked("early"))))
    await until_made(streams, StreamKey("", "early"))
    begun.set()
    assert (await early).code() == grpc.StatusCode.NOT_FOUND
    reading = asyncio.create_task(bare(attach(pair.a, "early")))
    pair.script.resume()
    whole = await making
    async with asyncio.timeout(60):
        assert await reading == whole


async def test_a_stream_that_was_lost_as_it_was_taken_over_is_found_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads from Redis fail right after the lease was acquired."""
    streams, taken, goes_on = streams_of(pair.b), asyncio.Event(), asyncio.Event()
    take = streams.store.acquire_lease

    async def slow_take(key: StreamKey, owner: str) -> bool:
        is_taken = await take(key, owner)
        taken.set()
        await goes_on.wait()
        return is_taken

    async def away(_: Sequence[tuple[StreamKey, int]]) -> list[StreamUpdate]:
        raise StoreUnavailable

    before = await pair.begun(pair.a.inference.Generate(asked("lost", max_tokens=60)), 3)
    monkeypatch.setattr(streams.store, "acquire_lease", slow_take)
    reader = asyncio.create_task(refusal(attach(pair.b, "lost")))
    await pair.kill_maker("lost")
    await taken.wait()
    with monkeypatch.context() as patched:
        patched.setattr(streams.store, "read", away)
        with pytest.raises(Unavailable):
            await streams.refresh(await streams.find("", "lost"))
    assert (await reader).code() == grpc.StatusCode.UNAVAILABLE
    goes_on.set()
    await asyncio.gather(*streams.follower.tasks.running)
    with pair.ask_redis() as client:  # as if its lease had expired
        client.delete(*client.keys("*:lease:lost"))
    async with asyncio.timeout(60):
        after = await bare(attach(pair.b, "lost", 3))
    assert offsets([*before, *after]) == [*range(len(before) + len(after))]
    assert len(tokens([*before, *after])) == 60


async def test_a_look_that_fails_late_says_nothing_of_a_stream_that_was_taken_over_since(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, fails = streams_of(pair.b), asyncio.Event()
    read, num_looks = streams.store.read, 0

    async def first_fails_late(wanted: Sequence[tuple[StreamKey, int]]) -> list[StreamUpdate]:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            await fails.wait()
            raise StoreUnavailable
        return await read(wanted)

    before = await pair.begun(pair.a.inference.Generate(asked("late", max_tokens=60)), 3)
    await pair.kill_maker("late")
    pair.script.pause()
    stream = await streams.find("", "late")
    monkeypatch.setattr(streams.store, "read", first_fails_late)
    looking = asyncio.create_task(streams.refresh(stream))
    await until_made(streams, stream.key)
    fails.set()
    await looking
    pair.script.resume()
    async with asyncio.timeout(60):
        after = await bare(attach(pair.b, "late", 3))
    assert len(tokens([*before, *after])) == 60
    assert streams.known[stream.key] is stream
