"""A file with secrets, one per line, not readable by other users, and read again when it changes.

Several lines allow rotation without interruption: the first is sent, all are accepted. To rotate, append the new
secret everywhere, then move it to the first line everywhere, then remove the old one.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from quire.shared.security.private_file import PrivateFile, UnusableFile

MIN_LENGTH = 32  # characters, as `openssl rand -hex 16` prints them: infeasible to guess
MAX_BYTES = 64 * 1024


class SecretFile:
    """The secrets of one file. `setting`: name of the setting that holds the path, for messages."""

    def __init__(self, path: str, setting: str, min_length: int = MIN_LENGTH) -> None:
        """Raises InvalidArgument for an unusable file."""
        self._min_length = min_length
        self._file = PrivateFile(path, setting, self._read, max_bytes=MAX_BYTES)

    @property
    def first(self) -> bytes:
        """The secret to send."""
        return self.all[0]

    @property
    def all(self) -> tuple[bytes, ...]:
        """The secrets to accept."""
        return self._file.held

    def holds(self, shown: bytes) -> bool:
        """Whether a secret is accepted, in constant time."""
        found = [hmac.compare_digest(secret, shown) for secret in self.all]
        return any(found)

    def _read(self, content: bytes) -> tuple[bytes, ...]:
        """Returns the secrets of the file's content, one per line that is not blank. Raises UnusableFile if there is
        none or one is too short."""
        secrets = tuple(line.strip() for line in content.splitlines() if line.strip())
        if not secrets:
            raise UnusableFile("it is empty")
        if min(map(len, secrets)) < self._min_length:
            raise UnusableFile(f"a secret has at least {self._min_length} characters (openssl rand -hex 32)")
        return secrets


def write(path: Path, secret: str) -> None:
    """Writes a new file that only this user can open."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
