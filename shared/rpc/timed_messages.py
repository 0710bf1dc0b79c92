"""Reads and writes of a gRPC call's messages within a time limit, so that a silent peer occupies nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.shared.errors import DeadlineExceeded
from quire.shared.rpc.parts import CallStream


async def read_message(stream: CallStream, within_s: float, otherwise: str) -> Any:
    """Returns the peer's next message. Raises DeadlineExceeded with the text `otherwise` if there is none in time."""
    try:
        async with asyncio.timeout(within_s):
            return await stream.read()
    except TimeoutError:
        raise DeadlineExceeded(f"{otherwise} within {within_s:g} s") from None


async def write_message(stream: CallStream, message: Any, within_s: float, otherwise: str) -> None:
    """Sends a message. Raises DeadlineExceeded with the text `otherwise` if the peer does not read it in time."""
    try:
        async with asyncio.timeout(within_s):
            await stream.write(message)
    except TimeoutError:
        raise DeadlineExceeded(f"{otherwise} within {within_s:g} s") from None
