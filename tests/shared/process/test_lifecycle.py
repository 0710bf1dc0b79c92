"""Of several tasks the first that ends ends all, whatever the others think of it."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import Internal
from shared.process import lifecycle


async def test_what_loses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "CANCEL_AGAIN_S", 0.05)
    lost = []

    async def loses_one() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            lost.append(True)
        await asyncio.sleep(60)

    async def ends() -> None:
        await asyncio.sleep(0.01)

    async with asyncio.timeout(60):
        await lifecycle.first(loses_one(), ends())
    assert lost == [True]


async def test_what_the_first_raises_is_raised() -> None:
    async def fails() -> None:
        raise Internal("broken")

    with pytest.raises(Internal, match="broken"):
        await lifecycle.first(asyncio.sleep(60), fails())


async def test_a_cancellation_that_nobody_asked_for_is_an_error() -> None:
    async def cancelled_from_within() -> None:
        raise asyncio.CancelledError

    with pytest.raises(Internal, match="nobody here asked"):
        await lifecycle.first(asyncio.sleep(60), cancelled_from_within())


async def test_an_error_is_raised_before_a_cancellation_that_came_with_it() -> None:
    call: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def writes() -> None:
        await call

    async def reads() -> None:
        call.cancel()
        raise Internal("silent")

    with pytest.raises(Internal, match="silent"):
        await lifecycle.first(writes(), reads())
