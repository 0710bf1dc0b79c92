"""Store of the tenants' files on a disk that the frontends of a cluster share. All methods block: call them in a
thread."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quire.services.frontend.offline.temp_files import TempFiles
from quire.shared.errors import InvalidArgument, NotFound, ResourceExhausted

FILE_ID = re.compile(r"file-[0-9a-f]{32}")
MAX_FILES = 100_000
PURPOSES = ("assistants", "batch", "batch_output", "evals", "fine-tune", "user_data", "vision")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Metadata of one stored file."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def to_openai(self) -> dict[str, Any]:
        """Returns the metadata as OpenAI's object."""
        fields = asdict(self)
        del fields["tenant"]
        return {**fields, "object": "file", "status": "processed"}


class FileStore:
    """Files in a folder, each as two: its bytes, and its metadata, which is written last."""

    def __init__(self, folder: Path, max_bytes: int, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self.max_file_bytes = max_file_bytes
        self._reserved_bytes = 0  # of uploads in progress
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._temp_files = TempFiles(folder)

    def temp_path(self) -> Path:
        """Returns a new path for bytes that store() moves."""
        return self._temp_files.new()

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Reserves space for `num_bytes` within the block: check_space() of other uploads counts them as used."""
        self._reserved_bytes += num_bytes
        try:
            yield
        finally:
            self._reserved_bytes -= num_bytes

    def check_space(self) -> None:
        """Raises ResourceExhausted if the stored files and the uploads in progress exceed the limits."""
        sizes = [size for entry in os.scandir(self._folder) if (size := _size(entry)) is not None]
        if len(sizes) >= 2 * MAX_FILES or sum(sizes) + self._reserved_bytes > self._max_bytes:
            raise ResourceExhausted("file: the file store is full; delete some files", field="file")

    def store(self, scratch: Path, tenant: str, filename: str, purpose: str) -> StoredFile:
        """Moves `scratch` into the store under a new file id and writes its metadata; raises InvalidArgument for an
        unknown purpose."""
        if purpose not in PURPOSES:
            names = ", ".join(PURPOSES)
            raise InvalidArgument(f"purpose must be one of {names}, got {purpose[:64]!r}", field="purpose")
        file_id = f"file-{uuid.uuid4().hex}"
        stored = StoredFile(
            file_id, tenant, filename[:255] or "file", purpose, scratch.stat().st_size, int(time.time())
        )
        os.replace(scratch, self._bytes(file_id))
        write_json(self._metadata_path(file_id), asdict(stored), self.temp_path())
        return stored

    def get(self, file_id: str, tenant: str) -> StoredFile:
        """Returns the file's metadata; raises NotFound for a missing file and for files of other tenants."""
        file = self._read(self._metadata_path(file_id)) if FILE_ID.fullmatch(file_id) else None
        if file is None or file.tenant != tenant:
            raise _not_found(file_id)
        return file

    def path(self, file_id: str, tenant: str) -> Path:
        """Returns the path of a tenant's content; raises NotFound as `get` does."""
        self.get(file_id, tenant)
        return self._bytes(file_id)

    def open(self, file_id: str, tenant: str) -> BinaryIO:
        """Opens a tenant's file, whose content stays readable if it is deleted meanwhile; raises NotFound as `get`
        does."""
        self.get(file_id, tenant)
        try:
            return self._bytes(file_id).open("rb")
        except FileNotFoundError:
            raise _not_found(file_id) from None

    def list_for(self, tenant: str) -> list[StoredFile]:
        """Returns the tenant's files, the newest first."""
        files = [file for file in self._all() if file.tenant == tenant]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    def _all(self) -> Iterator[StoredFile]:
        for path in self._folder.glob("file-*.json"):
            if (found := self._read(path)) is not None:
                yield found

    @staticmethod
    def _read(path: Path) -> StoredFile | None:
        """Reads the metadata; None if it is missing, incomplete or malformed."""
        try:
            return StoredFile(**json.loads(path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def delete(self, file_id: str, tenant: str) -> None:
        """Deletes the file's metadata and content; raises NotFound as `get` does. Readers that have opened it are
        not affected."""
        self.get(file_id, tenant)
        self._metadata_path(file_id).unlink(missing_ok=True)
        self._bytes(file_id).unlink(missing_ok=True)

    def _bytes(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.bytes"

    def _metadata_path(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"No such file: {file_id[:64]!r}", field="file_id")


def _size(entry: os.DirEntry[str]) -> int | None:
    """Returns the size; None for anything but a file, and for a file deleted since it was listed."""
    try:
        return entry.stat().st_size if entry.is_file() else None
    except FileNotFoundError:
        return None


def write_json(path: Path, document: Any, scratch: Path) -> None:
    """Writes the document atomically: first to `scratch`, which must be on the same disk and is then renamed."""
    scratch.write_text(json.dumps(document))
    os.replace(scratch, path)
