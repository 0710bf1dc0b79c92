"""A file with secrets: not readable by other users, and read again when it changes."""

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
    """Describes what is wrong with a file's contents, without quoting them."""


class PrivateFile(Generic[Held]):
    """Parsed contents of a file. If the file becomes unusable, the previous contents stay in effect."""

    def __init__(
        self,
        path: str,
        setting: str,
        read: Callable[[bytes], Held],
        *,
        max_bytes: int,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        """`setting`: name of the setting that holds the path, for messages; `read`: parses the bytes and raises
        UnusableFile; `on_error`: called once for each new reason why a changed file is unusable.

        Raises InvalidArgument for an unusable file.
        """
        self._path = Path(path)
        self._setting = setting
        self._read_bytes = read
        self._max_bytes = max_bytes
        self._on_error = on_error
        self._stamp = self._look()
        self._held = self._read()
        self._failure = ""  # why the file is currently unusable; empty: it is not

    @property
    def held(self) -> Held:
        """Contents of the file, read again if it has changed. If it is unusable now, logs an error and calls
        `on_error`, once per reason, and returns the previous contents."""
        try:
            self._reload(self._look())
        except InvalidArgument as error:  # logged once per reason
            if self._failure != error.message:
                log.error("cannot use the changed file; the previous contents stay in effect", reason=error.message)
                self._on_error()
            self._failure = error.message
        return self._held

    def _reload(self, stamp: Stamp) -> None:
        """Reads the file again if its stamp differs from that of the last attempt. Raises InvalidArgument for
        unusable contents, which are not tried again until the file changes."""
        if stamp == self._stamp:
            return
        self._stamp, self._failure = stamp, ""
        self._held = self._read()
        log.info("file reloaded", setting=self._setting)

    def _look(self) -> Stamp:
        """Returns modification time, inode and size of the file. Raises InvalidArgument if it is missing, too large,
        or other users can open it."""
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._refusal(f"cannot read it: {error.strerror}") from None
        if stat.S_IMODE(status.st_mode) & 0o007:
            raise self._refusal("other users can open it (chmod o-rwx)")
        if status.st_size > self._max_bytes:
            raise self._refusal(f"it has {status.st_size} bytes; at most {self._max_bytes} are read")
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> Held:
        """Reads and parses the file. Raises InvalidArgument if it cannot be read or its contents are unusable."""
        try:
            with self._path.open("rb") as file:
                return self._read_bytes(file.read(self._max_bytes))
        except OSError as error:
            raise self._refusal(f"cannot read it: {error.strerror}") from None
        except UnusableFile as error:
            raise self._refusal(str(error)) from None

    def _refusal(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"{self._setting}: {str(self._path)!r}: {what}", field=self._setting)
