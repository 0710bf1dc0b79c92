"""Secrets in a file: one a line, readable by nobody else, read again when the file changes.

Several lines are for changing a secret without a gap: the first is the one to show, all are accepted. So the new one is
added as the last line everywhere, then moved to the front everywhere, then the old one is taken out.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from quire.shared.security.private_file import PrivateFile, UnusableFile

MIN_LENGTH = 32  # characters: what `openssl rand -hex 16` gives, beyond any guessing
MAX_BYTES = 64 * 1024


class SecretFile:
    """`setting` is the name of the setting that holds the path, for messages."""

    def __init__(self, path: str, setting: str, min_length: int = MIN_LENGTH) -> None:
        """Raises InvalidArgument for a file that is no use."""
        self._min_length = min_length
        self._file = PrivateFile(path, setting, self._read, max_bytes=MAX_BYTES)

    @property
    def first(self) -> bytes:
        """The one to show."""
        return self.all[0]

    @property
    def all(self) -> tuple[bytes, ...]:
        """Those that are accepted."""
        return self._file.held

    def holds(self, shown: bytes) -> bool:
        """Takes as long whatever was shown."""
        found = [hmac.compare_digest(secret, shown) for secret in self.all]
        return any(found)

    def _read(self, content: bytes) -> tuple[bytes, ...]:
        secrets = tuple(line.strip() for line in content.splitlines() if line.strip())
        if not secrets:
            raise UnusableFile("it is empty")
        if min(map(len, secrets)) < self._min_length:
            raise UnusableFile(f"a secret has at least {self._min_length} characters (openssl rand -hex 32)")
        return secrets


def write(path: Path, secret: str) -> None:
    """A new file that only this user can open."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
