"""A file that guards something: open to nobody else on this machine, read again when it changes."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger

log = logger("private_file")

Held = TypeVar("Held")
Stamp = tuple[int, int, int]


class UnusableFile(ValueError):
    """What is wrong with a file's content, without a word of it."""


class PrivateFile(Generic[Held]):
    """What `read` makes of its bytes. A file that became unusable leaves what was there before."""

    def __init__(
        self,
        path: str,
        setting: str,
        read: Callable[[bytes], Held],
        *,
        max_bytes: int,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        """`setting` is the name of the setting that holds the path, for messages; `read` raises UnusableFile;
        `on_error` is called once for each way in which a changed file is no use.

        Raises InvalidArgument for a file that is no use.
        """
        self._path = Path(path)
        self._setting = setting
        self._read_bytes = read
        self._max_bytes = max_bytes
        self._on_error = on_error
        self._stamp = self._look()
        self._held = self._read()
        self._failure = ""  # why the file is no use at present

    @property
    def held(self) -> Held:
        try:
            self._follow(self._look())
        except InvalidArgument as error:  # told once, until something changes
            if self._failure != error.message:
                log.error("what was read before stays", reason=error.message)
                self._on_error()
            self._failure = error.message
        return self._held

    def _follow(self, stamp: Stamp) -> None:
        if stamp == self._stamp:
            return
        self._stamp, self._failure = stamp, ""
        self._held = self._read()
        log.info("read again", setting=self._setting)

    def _look(self) -> Stamp:
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._wrong(f"cannot read it: {error.strerror}") from None
        if stat.S_IMODE(status.st_mode) & 0o007:
            raise self._wrong("everybody on this machine may open it (chmod o-rwx)")
        if status.st_size > self._max_bytes:
            raise self._wrong(f"it has {status.st_size} bytes; at most {self._max_bytes} are read")
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> Held:
        try:
            with self._path.open("rb") as file:
                return self._read_bytes(file.read(self._max_bytes))
        except OSError as error:
            raise self._wrong(f"cannot read it: {error.strerror}") from None
        except UnusableFile as error:
            raise self._wrong(str(error)) from None

    def _wrong(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"{self._setting}: {str(self._path)!r}: {what}", field=self._setting)
