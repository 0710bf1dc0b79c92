"""Notices that an HTTP client has gone, while somebody works for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from quire.shared.process.supervision import Tasks

_watchers = Tasks()  # each is ended by the request that it watches


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Leaves the body, as if it had ended, as soon as the client disconnects; the body sees a cancellation.

    To be entered once the request's own body has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = _watchers.start("disconnect", watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
    finally:
        watcher.cancel()
