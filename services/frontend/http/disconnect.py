"""Detects the disconnect of an HTTP client while its request is processed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from quire.shared.process.supervision import Tasks

_watchers = Tasks()  # each is cancelled by its request


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Leaves the `with` body as if it had ended when the client disconnects; inside, that is a cancellation.

    Enter it only after the request's body has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    has_disconnected = False

    async def watch() -> None:
        """Cancels the task in the `with` as soon as the client disconnects."""
        nonlocal has_disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        has_disconnected = True
        task.cancel()

    watcher = _watchers.start("disconnect", watch())
    try:
        yield
    except asyncio.CancelledError:
        if not has_disconnected:
            raise
        task.uncancel()
    finally:
        watcher.cancel()
