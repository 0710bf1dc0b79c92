"""Time limit for clients that stop sending in the middle of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from quire.shared.errors import DeadlineExceeded

M = TypeVar("M")


async def with_timeout(messages: AsyncIterator[M], stalled_s: float) -> AsyncIterator[M]:
    """Yields the messages of a stream. Raises DeadlineExceeded if none comes for `stalled_s`."""
    while True:
        try:
            async with asyncio.timeout(stalled_s):
                message = await anext(messages, None)
        except TimeoutError:
            raise DeadlineExceeded(f"content: no data was received for {stalled_s:g} s", field="content") from None
        if message is None:
            return
        yield message
