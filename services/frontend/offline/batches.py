"""Store of batches on the disk that frontends share.

The process that holds a batch's lock runs it; a process that dies loses its locks. All methods block: call them in a
thread.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quire.services.frontend.offline.batch import DAY_S, Batch
from quire.services.frontend.offline.files import write_json
from quire.services.frontend.offline.temp_files import TempFiles
from quire.shared import batch_lines
from quire.shared.errors import NotFound, ResourceExhausted

BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
MAX_UNFINISHED = 64  # per tenant
MAX_BATCHES = 100_000


class BatchStore:
    """Batches in a folder: ID.json holds the state, ID.lock the running frontend, ID.cancel requests cancellation,
    ID.output and ID.error hold the answers so far."""

    def __init__(self, folder: Path, max_batches: int = MAX_BATCHES) -> None:
        self._folder, self._max_batches = folder, max_batches
        self._ended: set[str] = set()  # batches that cannot change any more
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._temp_files = TempFiles(folder)

    def create(
        self, tenant: str, key: str, *, endpoint: str, input_file_id: str, metadata: dict[str, str] | None
    ) -> Batch:
        """Creates and saves a batch with a new id that expires after a day. Raises ResourceExhausted at `max_batches`
        batches in the store or MAX_UNFINISHED unfinished ones of the tenant."""
        if sum(1 for _ in self._folder.glob("batch_*.json")) >= self._max_batches:
            raise ResourceExhausted(
                f"{self._max_batches} batches are stored, which is the maximum; delete some, or wait until they expire"
            )
        unfinished = [batch for batch in self.unfinished() if batch.tenant == tenant]
        if len(unfinished) >= MAX_UNFINISHED:
            raise ResourceExhausted(
                f"{MAX_UNFINISHED} batches are unfinished, which is the maximum; retry when one has finished"
            )
        now = int(time.time())
        batch = Batch(
            f"batch_{uuid.uuid4().hex}",
            tenant,
            key,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window="24h",
            created_at=now,
            expires_at=now + DAY_S,
            metadata=metadata,
        )
        self.save(batch)
        return batch

    def save(self, batch: Batch) -> None:
        write_json(self._path(batch.id, "json"), batch.to_dict(), self._temp_files.new())

    def get(self, batch_id: str, tenant: str) -> Batch:
        """Reads a tenant's batch; raises NotFound if it does not exist or belongs to another tenant."""
        batch = self.find(batch_id)
        if batch is None or batch.tenant != tenant:
            raise NotFound(f"No such batch: {batch_id[:64]!r}", field="batch_id")
        return batch

    def find(self, batch_id: str) -> Batch | None:
        """Reads a batch of any tenant; None if the id is malformed, or its file is missing or unreadable."""
        if not BATCH_ID.fullmatch(batch_id):
            return None
        try:
            return Batch(**json.loads(self._path(batch_id, "json").read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def all(self) -> list[Batch]:
        batches = (self.find(path.stem) for path in self._folder.glob("batch_*.json"))
        return [batch for batch in batches if batch is not None]

    def unfinished(self) -> list[Batch]:
        """Returns the unfinished batches; the state of ended ones is not read again."""
        unfinished = []
        for path in self._folder.glob("batch_*.json"):
            batch = None if path.stem in self._ended else self.find(path.stem)
            if batch is not None and batch.has_ended:
                self._ended.add(batch.id)
            elif batch is not None:
                unfinished.append(batch)
        return unfinished

    def list_for(self, tenant: str) -> list[Batch]:
        """Returns the tenant's batches, the newest first."""
        batches = [batch for batch in self.all() if batch.tenant == tenant]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def cancel(self, batch_id: str, tenant: str) -> Batch:
        """Requests the cancellation of a tenant's batch by a marker file, which the process that runs it polls.
        Returns the batch as stored; a finished one is left unchanged. Raises NotFound as `get` does."""
        batch = self.get(batch_id, tenant)
        if not batch.has_ended:
            self._path(batch_id, "cancel").touch()
        return batch

    def is_cancelled(self, batch_id: str) -> bool:
        return self._path(batch_id, "cancel").exists()

    def try_lock(self, batch_id: str) -> BinaryIO | None:
        """Returns the batch's lock, held until the file is closed; None while another process holds it."""
        lock = self._path(batch_id, "lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        return lock

    def answers_path(self, batch_id: str, kind: str) -> Path:
        """Returns the path of a batch's answers of one kind, `output` or `error`; the file need not exist."""
        return self._path(batch_id, kind)

    def answered_lines(self, batch_id: str, kind: str) -> list[int]:
        """Returns the numbers of the lines that have an answer of the kind `output` or `error`. Truncates a partial
        last line in the file, left by a process that died."""
        path = self.answers_path(batch_id, kind)
        numbers, end = [], 0
        with _opened(path) as file:
            for answer, end in batch_lines.read_output(file):  # noqa: B007 (the last one is wanted)
                numbers.append(int(str(answer.get("id", "")).rpartition("_")[2]))
        os.truncate(path, end)
        return numbers

    def delete_answers(self, batch_id: str) -> None:
        """Deletes the answers of an ended batch, which have been stored as files."""
        for kind in ("output", "error", "cancel", "lock"):
            self._path(batch_id, kind).unlink(missing_ok=True)

    def _path(self, batch_id: str, kind: str) -> Path:
        return self._folder / f"{batch_id}.{kind}"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    path.touch(mode=0o600)
    with path.open("rb") as file:
        yield file
