"""Wiring of files and batches; both are disabled without a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.types import ASGIApp

from quire.services.frontend.access.access import Access
from quire.services.frontend.http.body import BodyReader
from quire.services.frontend.offline.batches import BatchStore
from quire.services.frontend.offline.files import FileStore
from quire.services.frontend.offline.internal_client import InternalClient
from quire.services.frontend.offline.operations import OfflineOperations
from quire.services.frontend.offline.routes import OfflineRoutes
from quire.services.frontend.offline.runner import BatchDependencies, BatchRunner
from quire.shared.metrics.batches import BatchMetrics
from quire.shared.process.supervision import run_restarting
from quire.shared.settings.frontend import FrontendSettings


class OfflineService:
    """Files, batches, and their runner."""

    def __init__(
        self,
        settings: FrontendSettings,
        access: Access,
        bounds: BodyReader,
        metrics: BatchMetrics,
        is_leaving: Callable[[], bool],
        *,
        poll_s: float,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._access = access
        self._is_leaving = is_leaving
        self._poll_s = poll_s
        self._files: FileStore | None = None
        self._batches: BatchStore | None = None
        if settings.batch_folder:
            folder = Path(settings.batch_folder).expanduser()
            self._files = FileStore(folder / "files", settings.batch_store_mb << 20, settings.batch_file_mb << 20)
            self._batches = BatchStore(folder / "batches")
        self._runner: BatchRunner | None = None
        self.work = OfflineOperations(self._files, self._batches, self._notify)
        self.router = OfflineRoutes(self.work, bounds).router

    def _notify(self) -> None:
        if self._runner is not None:
            self._runner.notify()

    def set_app(self, app: ASGIApp) -> None:
        """Creates the runner, whose batches send their lines to `app`; does nothing if no folder for files and
        batches is configured."""
        if self._files is not None and self._batches is not None:
            line_slots = asyncio.Semaphore(self._settings.batch_concurrency)
            validation_slots = asyncio.Semaphore(1)
            stores = self._files, self._batches
            dependencies = BatchDependencies(
                *stores,
                InternalClient(app),
                self._access,
                line_slots=line_slots,
                validation_slots=validation_slots,
                metrics=self._metrics,
                poll_s=self._poll_s,
            )
            self._runner = BatchRunner(dependencies, self._is_leaving)

    def tasks(self) -> list[Awaitable[None]]:
        """Returns the tasks to run as long as the frontend runs."""
        return [] if self._runner is None else [run_restarting("batches", self._runner.run, is_needed=False)]
