"""Adapters that operators load and unload: through all schedulers, and this frontend's requests go by it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.services.frontend.operations.scheduler_admins import SchedulerAdmins
from quire.services.frontend.scheduler_client.client import SchedulerClient
from quire.shared.pb.admin.v1 import admin_pb2 as pb

TOLD_WITHIN_S = 5.0  # schedulers tell frontends before they answer operators, on another stream


class AdapterOperator:
    """For gRPC and HTTP."""

    def __init__(self, schedulers: SchedulerAdmins, client: SchedulerClient) -> None:
        self._schedulers = schedulers
        self._client = client

    async def load(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Raises QuireError."""
        loaded = await self._schedulers.load_adapter(request)
        await self._until(lambda: self._digest(request.name) in (None, loaded.digest))
        return loaded

    async def unload(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Raises QuireError."""
        unloaded = await self._schedulers.unload_adapter(request)
        await self._until(lambda: not self._digest(request.name))
        return unloaded

    def _digest(self, name: str) -> bytes | None:
        """Empty: it is not there; None: nobody knows, because no worker is there."""
        limits = self._client.limits
        return None if limits is None else limits.adapters.get(name, b"")

    async def _until(self, is_told: Callable[[], bool]) -> None:
        """At most for a while: another operator may have changed it again."""
        try:
            async with asyncio.timeout(TOLD_WITHIN_S):
                while not is_told():
                    await self._client.wait_for_change()
        except TimeoutError:
            return
