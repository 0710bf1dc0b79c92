"""Secrets in a file: one a line, readable by nobody else, read again when the file changes.

Several lines are for changing a secret without a gap: the first is the one to show, all are accepted. So the new one is
added as the last line everywhere, then moved to the front everywhere, then the old one is taken out.
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

from shared.errors import InvalidArgument
from shared.logs import logger

log = logger("secrets")

MIN_LENGTH = 32  # characters: what `openssl rand -hex 16` gives, beyond any guessing
MAX_BYTES = 64 * 1024

Stamp = tuple[int, int, int]


class SecretFile:
    """`setting` is the name of the setting that holds the path, for messages."""

    def __init__(self, path: str, setting: str, min_length: int = MIN_LENGTH) -> None:
        """Raises InvalidArgument for a file that is no use."""
        self._path = Path(path)
        self._setting = setting
        self._min_length = min_length
        self._stamp = self._look()
        self._secrets = self._read()
        self._failure = ""  # why the file is no use at present

    @property
    def first(self) -> bytes:
        """The one to show."""
        return self.all[0]

    @property
    def all(self) -> tuple[bytes, ...]:
        """Those that are accepted. A file that became unusable leaves those from before."""
        try:
            self._follow(self._look())
        except InvalidArgument as error:  # told once, until something changes
            if self._failure != error.message:
                log.error("secrets stay as they were", reason=error.message)
            self._failure = error.message
        return self._secrets

    def _follow(self, stamp: Stamp) -> None:
        if stamp == self._stamp:
            return
        self._stamp, self._failure = stamp, ""
        self._secrets = self._read()
        log.info("secrets read again", setting=self._setting, count=len(self._secrets))

    def holds(self, shown: bytes) -> bool:
        """Takes as long whatever was shown."""
        found = [hmac.compare_digest(secret, shown) for secret in self.all]
        return any(found)

    def _look(self) -> Stamp:
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._wrong(f"cannot read it: {error.strerror}") from None
        if stat.S_IMODE(status.st_mode) & 0o007:
            raise self._wrong("everybody on this machine may open it (chmod o-rwx)")
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> tuple[bytes, ...]:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES)
        except OSError as error:
            raise self._wrong(f"cannot read it: {error.strerror}") from None
        secrets = tuple(line.strip() for line in content.splitlines() if line.strip())
        if not secrets:
            raise self._wrong("it is empty")
        if min(map(len, secrets)) < self._min_length:
            raise self._wrong(f"a secret has at least {self._min_length} characters (openssl rand -hex 32)")
        return secrets

    def _wrong(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"{self._setting}: {str(self._path)!r}: {what}", field=self._setting)


def write(path: Path, secret: str) -> None:
    """A new file that only this user can open."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
