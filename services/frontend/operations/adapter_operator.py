"""Loads and unloads adapters at all schedulers, and waits until this frontend's requests can use the change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.services.frontend.operations.scheduler_admins import SchedulerAdmins
from quire.services.frontend.scheduler_client.client import SchedulerClient
from quire.shared.pb.admin.v1 import admin_pb2 as pb

VISIBLE_WITHIN_S = 5.0  # schedulers notify frontends, on another stream, before they answer operators


class AdapterOperator:
    """Loads and unloads adapters for gRPC and HTTP, and waits until this frontend's catalogue shows it."""

    def __init__(self, schedulers: SchedulerAdmins, client: SchedulerClient) -> None:
        self._schedulers = schedulers
        self._client = client

    async def load(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Loads an adapter at all schedulers and waits, for a bounded time, until requests here may name it. Raises
        QuireError."""
        loaded = await self._schedulers.load_adapter(request)
        await self._wait_until(lambda: self._digest(request.name) in (None, loaded.digest))
        return loaded

    async def unload(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Unloads an adapter at all schedulers and waits, for a bounded time, until requests here can no longer name
        it. Raises QuireError."""
        unloaded = await self._schedulers.unload_adapter(request)
        await self._wait_until(lambda: not self._digest(request.name))
        return unloaded

    def _digest(self, name: str) -> bytes | None:
        """Returns the adapter's digest; empty if it is not loaded, None if unknown because there is no worker."""
        limits = self._client.limits
        return None if limits is None else limits.adapters.get(name, b"")

    async def _wait_until(self, is_visible: Callable[[], bool]) -> None:
        """Waits for the condition, for a bounded time: another operator may have changed the adapter again. Does not
        raise when the time is over."""
        try:
            async with asyncio.timeout(VISIBLE_WITHIN_S):
                while not is_visible():
                    await self._client.wait_for_change()
        except TimeoutError:
            return
