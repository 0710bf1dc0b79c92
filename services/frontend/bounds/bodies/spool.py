"""What a client sends, kept where another process of this machine can read it, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import TracebackType
from typing import ClassVar, Self

from quire.services.frontend.bounds.bodies.heavy_work import HEAVY_BYTES

MAX_FILES = 32  # at a time: descriptors are for connections


class Spool:
    """Bytes in the order in which they came: few in this process, many in a file in memory (memfd_create(2)).

    A `with` gives the file back. Where there are as many files as there may be, bytes stay in this process."""

    num_files: ClassVar[int] = 0  # of all spools

    def __init__(self) -> None:
        self._chunks: list[bytes | memoryview] = []
        self._file: int | None = None
        self.num_bytes = 0
        self.ids_begin: int | None = None  # of which packed ids stand behind the rest (long_ids.py)

    @property
    def path(self) -> str | None:
        """Of the file, for processes of the same user; None while there is none, and elsewhere than on Linux."""
        return None if self._file is None else _path(self._file)

    @contextlib.contextmanager
    def pinned_path(self) -> Iterator[str]:
        """Another path of the file, where it stays as long as this lasts, whatever becomes of the spool."""
        assert self._file is not None
        own = os.dup(self._file)
        try:
            yield _path(own)
        finally:
            os.close(own)

    def append(self, chunk: bytes | memoryview) -> None:
        self.num_bytes += len(chunk)
        self._chunks.append(chunk)
        if self._file is None and self.num_bytes > HEAVY_BYTES:
            self._open()
        if self._file is not None:
            for kept in self._chunks:
                os.write(self._file, kept)  # a file in memory takes all of it
            self._chunks.clear()

    def _open(self) -> None:
        if Spool.num_files < MAX_FILES and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # no descriptor is left
                self._file = os.memfd_create("quire-body")
                Spool.num_files += 1

    def mark_ids(self, begin: int) -> None:
        """The process that looks at it has taken a list out, and put it there."""
        assert self._file is not None
        self.ids_begin, self.num_bytes = begin, os.fstat(self._file).st_size

    def take_all(self) -> bytes:
        """All of it, which is kept here no longer."""
        taken = b"".join(self._chunks) if self._file is None else os.pread(self._file, self.num_bytes, 0)
        self.close()
        return taken

    def close(self) -> None:
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
