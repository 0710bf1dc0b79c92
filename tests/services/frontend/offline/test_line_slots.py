"""Tests that slots for lines, shared by all batches of a frontend, are released however a batch ends."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.access.access import Access
from quire.services.frontend.offline.batches import BatchStore
from quire.services.frontend.offline.files import FileStore
from quire.services.frontend.offline.internal_client import InternalClient
from quire.services.frontend.offline.runner import BatchDependencies, BatchRun
from quire.shared.metrics.frontend import FrontendMetrics

CHAT = "/v1/chat/completions"


class ValidatedBatch:
    """Validated batch of `num_lines` lines, and the dependencies to run it."""

    def __init__(self, folder: Path, num_lines: int, store: Callable[[Path], BatchStore] = BatchStore) -> None:
        self.files, self.batches = FileStore(folder / "files", 1 << 20, 1 << 20), store(folder / "batches")
        self.slots = asyncio.Semaphore(num_lines)
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        scratch = self.files.temp_path()
        bodies = [{"custom_id": f"q{i}", "method": "POST", "url": CHAT, "body": {}} for i in range(num_lines)]
        scratch.write_text("".join(json.dumps(body) + "\n" for body in bodies))
        file_id = self.files.store(scratch, "", "in.jsonl", "batch").id
        made = self.batches.create("", "", endpoint=CHAT, input_file_id=file_id, metadata=None)
        batch = made.with_status("in_progress", 1, total=num_lines)
        metrics, looks = FrontendMetrics("m", 100), asyncio.Semaphore(1)
        access, calls = Access([], metrics, time.monotonic), InternalClient(self._break)
        stores = self.files, self.batches
        dependencies = BatchDependencies(
            *stores, calls, access, line_slots=self.slots, validation_slots=looks, metrics=metrics.batches
        )
        self.run = BatchRun(batch, dependencies)

    async def _break(self, *_: Any) -> None:
        await self.broken

    @property
    def num_free(self) -> int:
        return self.slots._value


async def test_a_batch_cancelled_just_after_acquiring_a_slot_releases_it(tmp_path: Path) -> None:
    asked, answered = threading.Event(), threading.Event()

    class SlowStore(BatchStore):
        def is_cancelled(self, batch_id: str) -> bool:
            asked.set()
            return not answered.wait(60)

    batch = ValidatedBatch(tmp_path, 1, SlowStore)
    running = asyncio.create_task(batch.run.run())
    assert await asyncio.to_thread(asked.wait, 60)
    running.cancel()
    answered.set()
    await asyncio.wait([running])
    assert running.cancelled()
    assert batch.num_free == 1


async def test_a_line_cancelled_before_its_first_step_releases_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks this where another line fails at the moment when this one starts, as with a full disk."""
    batch = ValidatedBatch(tmp_path, 2)
    asked: asyncio.Queue[asyncio.Future[str]] = asyncio.Queue()

    async def ending() -> str:
        may_begin = asyncio.get_running_loop().create_future()
        asked.put_nowait(may_begin)
        return await may_begin

    monkeypatch.setattr(batch.run, "_ending", ending)
    running = asyncio.create_task(batch.run.run())
    (await asked.get()).set_result("completed")
    second = await asked.get()
    batch.broken.set_exception(OSError(28, "No space left on device"))
    second.set_result("completed")
    await asyncio.wait([running])
    assert isinstance(running.exception(), ExceptionGroup)
    assert batch.num_free == 2
