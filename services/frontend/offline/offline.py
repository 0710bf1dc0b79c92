"""The parts of this room put together: nothing where there is no folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.types import ASGIApp

from quire.services.frontend.access.access import Access
from quire.services.frontend.http.body import BodyBounds
from quire.services.frontend.offline.batches import BatchStore
from quire.services.frontend.offline.files import FileStore
from quire.services.frontend.offline.inner_calls import InnerCalls
from quire.services.frontend.offline.routes import OfflineRoutes
from quire.services.frontend.offline.runner import BatchRunner, Means
from quire.services.frontend.offline.work import OfflineWork
from quire.shared.metrics.batches import BatchMetrics
from quire.shared.process.supervision import restarted
from quire.shared.settings.frontend import FrontendSettings


class Offline:
    """Files, batches, and who runs them."""

    def __init__(
        self,
        settings: FrontendSettings,
        access: Access,
        bounds: BodyBounds,
        metrics: BatchMetrics,
        is_leaving: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._access = access
        self._is_leaving = is_leaving
        self._files: FileStore | None = None
        self._batches: BatchStore | None = None
        if settings.batch_folder:
            folder = Path(settings.batch_folder).expanduser()
            self._files = FileStore(folder / "files", settings.batch_store_mb << 20, settings.batch_file_mb << 20)
            self._batches = BatchStore(folder / "batches")
        self._runner: BatchRunner | None = None
        self.work = OfflineWork(self._files, self._batches, self._tell)
        self.router = OfflineRoutes(self.work, bounds).router

    def _tell(self) -> None:
        if self._runner is not None:
            self._runner.tell()

    def call(self, app: ASGIApp) -> None:
        """`app`: what answers the lines of batches."""
        if self._files is not None and self._batches is not None:
            places = asyncio.Semaphore(self._settings.batch_concurrency)
            looks = asyncio.Semaphore(1)
            stores = self._files, self._batches
            means = Means(*stores, InnerCalls(app), self._access, places=places, looks=looks, metrics=self._metrics)
            self._runner = BatchRunner(means, self._is_leaving)

    def tasks(self) -> list[Awaitable[None]]:
        """To be run as long as the frontend runs."""
        return [] if self._runner is None else [restarted("batches", self._runner.run, is_needed=False)]
