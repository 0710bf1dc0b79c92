"""A received body, stored so that another process of this machine can read it as well."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import TracebackType
from typing import ClassVar, Self

from quire.services.frontend.bounds.bodies.heavy_work import HEAVY_BYTES

MAX_FILES = 32  # open at a time; descriptors are needed for connections


class Spool:
    """Bytes in order of arrival: small bodies in a list, large ones in an in-memory file (memfd_create(2)).

    Use it in a `with`, which closes the file. Beyond MAX_FILES open files, bytes stay in this process.
    """

    num_files: ClassVar[int] = 0  # open files of all spools

    def __init__(self) -> None:
        self._chunks: list[bytes | memoryview] = []
        self._file: int | None = None
        self.num_bytes = 0
        self.ids_begin: int | None = None  # offset of packed ids after the body (long_ids.py)

    @property
    def path(self) -> str | None:
        """Path of the file for processes of the same user; None while there is no file, and on systems other than
        Linux."""
        return None if self._file is None else _path(self._file)

    @contextlib.contextmanager
    def pinned_path(self) -> Iterator[str]:
        """Yields another path of the file that stays valid within the `with`, even if the spool is closed."""
        assert self._file is not None
        descriptor = os.dup(self._file)
        try:
            yield _path(descriptor)
        finally:
            os.close(descriptor)

    def append(self, chunk: bytes | memoryview) -> None:
        """Adds a chunk; moves everything to an in-memory file as soon as the size exceeds HEAVY_BYTES."""
        self.num_bytes += len(chunk)
        self._chunks.append(chunk)
        if self._file is None and self.num_bytes > HEAVY_BYTES:
            self._open()
        if self._file is not None:
            for part in self._chunks:
                os.write(self._file, part)  # an in-memory file never writes partially
            self._chunks.clear()

    def _open(self) -> None:
        """Opens the in-memory file, unless MAX_FILES are open, the system has none, or no descriptor is left."""
        if Spool.num_files < MAX_FILES and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # no descriptor is left
                self._file = os.memfd_create("quire-body")
                Spool.num_files += 1

    def mark_ids(self, begin: int) -> None:
        """Notes that the checking process has moved a list of ids to the offset `begin`."""
        assert self._file is not None
        self.ids_begin, self.num_bytes = begin, os.fstat(self._file).st_size

    def take_all(self) -> bytes:
        """Returns the whole body and closes the spool; ids that were moved to the end are part of it."""
        body = b"".join(self._chunks) if self._file is None else os.pread(self._file, self.num_bytes, 0)
        self.close()
        return body

    def close(self) -> None:
        """Drops the bytes and closes the file; a second call does nothing."""
        self._chunks.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None
            Spool.num_files -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"
