"""The store keeps what requests hold, bounds what they do not, and makes each item once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from quire.services.frontend.media import identity
from quire.services.frontend.media.store import MediaHolds, MediaStore
from quire.services.frontend.media.tiles import MediaTiles
from quire.services.frontend.request.media import MediaOptions
from quire.shared.errors import InvalidArgument, ResourceExhausted
from quire.shared.media.processor import TileLayout
from tests.waiting import loop_turns

SIZE = 10


def tiles(size: int = SIZE) -> MediaTiles:
    return MediaTiles(TileLayout(1, 1, 1), bytes(size))


def made(size: int = SIZE) -> Callable[[], Awaitable[MediaTiles]]:
    async def make() -> MediaTiles:
        return tiles(size)

    return make


@pytest_asyncio.fixture
async def store() -> AsyncIterator[MediaStore]:
    found = MediaStore(max_idle_bytes=3 * SIZE, max_held_bytes=5 * SIZE)
    yield found
    await found.close()


async def test_the_item_held_least_recently_leaves_first(store: MediaStore) -> None:
    for name in (b"a", b"b", b"c"):
        with store.holding() as holds:
            await holds.hold(name, made())
    with store.holding() as holds:
        await holds.hold(b"a", made())  # now the newest
    with store.holding() as holds:
        await holds.hold(b"d", made())
    assert [name for name in (b"a", b"b", b"c", b"d") if store.find(name) is not None] == [b"a", b"c", b"d"]
    assert (store.held_bytes, store.idle_bytes) == (0, 3 * SIZE)


async def test_held_items_stay_however_many_come(store: MediaStore) -> None:
    with store.holding() as first:
        await first.hold(b"kept", made())
        for number in range(100):
            with store.holding() as holds:
                await holds.hold(bytes([number]), made())
            store.check_invariants()
        assert store.find(b"kept") is not None
        assert store.idle_bytes == 3 * SIZE


async def test_requests_that_hold_too_much_are_refused_and_lose_nothing(store: MediaStore) -> None:
    with store.holding() as first:
        for number in range(5):
            await first.hold(bytes([number]), made())
        with store.holding() as second:
            with pytest.raises(ResourceExhausted, match="max_media_gb"):
                await second.hold(b"more", made())
            await second.hold(b"\x00", made())  # one that is there is no more
        store.check_invariants()
    assert store.held_bytes == 0
    with store.holding() as alone:
        await alone.hold(b"large", made(100 * SIZE))  # larger than the bound, but alone
    assert store.idle_bytes <= 3 * SIZE


async def test_equal_items_in_flight_are_made_once_and_an_error_reaches_all(store: MediaStore) -> None:
    calls, go = 0, asyncio.Event()

    async def make() -> MediaTiles:
        nonlocal calls
        calls += 1
        await go.wait()
        if calls == 1:
            raise InvalidArgument("no picture")
        return tiles()

    with store.holding() as one, store.holding() as two:
        both = [asyncio.ensure_future(holds.hold(b"x", make)) for holds in (one, two)]
        await loop_turns()
        go.set()
        assert [type(found) for found in await asyncio.gather(*both, return_exceptions=True)] == [InvalidArgument] * 2
        again = [asyncio.ensure_future(holds.hold(b"x", make)) for holds in (one, two)]
        assert await asyncio.gather(*again) == [tiles(), tiles()]
        assert calls == 2
    store.check_invariants()


async def test_a_caller_that_leaves_ends_the_work_only_if_nobody_else_waits(store: MediaStore) -> None:
    started, ended = 0, 0

    async def make() -> MediaTiles:
        nonlocal started, ended
        started += 1
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1
        return tiles()

    with store.holding() as one, store.holding() as two:
        first, second = (asyncio.ensure_future(holds.hold(b"x", make)) for holds in (one, two))
        await loop_turns(2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (started, ended) == (1, 0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await loop_turns()
        assert (started, ended) == (1, 1)
        assert await two.hold(b"x", made()) == tiles()  # the next one starts anew


async def test_names_end_with_their_items(store: MediaStore) -> None:
    with store.holding() as holds:
        await holds.hold(b"x", made(), b"cat")
    assert store.named(b"cat") == b"x"
    with store.holding() as holds:
        await holds.hold(b"y", made(), b"cat")  # the name now means another
    assert store.named(b"cat") == b"y"
    for number in range(4):
        with store.holding() as holds:
            await holds.hold(bytes([number]), made())
    assert store.named(b"cat") is None
    store.check_invariants()


async def test_random_use_keeps_the_counts(store: MediaStore) -> None:
    rng = random.Random(5)
    open_holds: list[MediaHolds] = []
    for _ in range(2000):
        if open_holds and rng.random() < 0.45:
            open_holds.pop(rng.randrange(len(open_holds))).__exit__(None, None, None)
        else:
            holds = store.holding()
            open_holds.append(holds)
            for _ in range(rng.randint(1, 3)):
                try:
                    await holds.hold(
                        bytes([rng.randrange(12)]), made(rng.randint(1, 2 * SIZE)), bytes([rng.randrange(4)])
                    )
                except ResourceExhausted:
                    break
        store.check_invariants()
        assert store.idle_bytes <= 3 * SIZE
    for holds in open_holds:
        holds.__exit__(None, None, None)
    store.check_invariants()
    assert store.held_bytes == 0


def test_identifiers_tell_apart_what_is_processed_differently() -> None:
    plain, model = MediaOptions(), b"m" * 32
    found = [
        identity.identifier(model, plain, b"file"),
        identity.identifier(model, plain, b"fil"),
        identity.identifier(model, plain, b"filee"),
        identity.identifier(b"n" * 32, plain, b"file"),
        identity.identifier(model, MediaOptions(image_mode="L"), b"file"),
        identity.identifier(model, MediaOptions(background=(0, 0, 0)), b"file"),
        identity.identifier(model, MediaOptions({"size": 3}), b"file"),
        identity.identifier(model, MediaOptions({"size": "3"}), b"file"),
        identity.identifier(model, MediaOptions({"size": [3]}), b"file"),
        identity.identifier(model[:-1], plain, b"m" + b"file"),  # the same bytes in other parts
    ]
    assert len(set(found)) == len(found)
    assert all(len(one) == 32 for one in found)
    first = identity.identifier(model, MediaOptions({"a": 1, "b": 2}), b"file")
    assert identity.identifier(model, MediaOptions({"b": 2, "a": 1}), b"file") == first
