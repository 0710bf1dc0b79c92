"""Temporary files, renamed when complete, in a folder that the frontends of a cluster share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
import weakref
from pathlib import Path

from quire.shared.logs import logger

log = logger("batches")

_OWNER = re.compile(r"[0-9a-f]{32}")
NO_OWNER = "0" * 32  # used where no lock can be had: its files are not swept


class TempFiles:
    """Temporary files of one frontend process: FOLDER/OWNER-ID.part, and FOLDER.owners/OWNER, locked for the process's
    lifetime.

    The next process to start sweeps the files of processes that have ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._owner = folder, NO_OWNER
        self._owners = folder.with_name(f"{folder.name}.owners")
        try:
            self._owners.mkdir(mode=0o700, exist_ok=True)
            self._owner = self._begin()
            self._sweep()
        except OSError as error:  # which may be repaired while the process runs
            log.warning("cannot delete temporary files of ended processes", folder=str(folder), reason=str(error))

    def new(self) -> Path:
        """Returns the path of a new temporary file."""
        return self._folder / f"{self._owner}-{uuid.uuid4().hex}.part"

    def _begin(self) -> str:
        """Creates this process's owner file and locks it until the object is collected; returns the owner's name,
        which prefixes its temporary files. Retries with another name if a sweep removed the file before the lock."""
        while True:
            owner = uuid.uuid4().hex
            path = self._owners / owner
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():  # no other process has swept it before it was locked
                return owner

    def _sweep(self) -> None:
        """Removes the temporary files of other processes that have died."""
        for path in [*self._owners.iterdir()]:
            if _OWNER.fullmatch(path.name) and path.name != self._owner:
                self._sweep_of(path.name, path)

    def _sweep_of(self, owner: str, alive: Path) -> None:
        """Removes the temporary files of `owner` and its owner file if no process holds the lock on it, which means
        that the owner has died."""
        # another process sweeps as well, or the owner lives
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            lock = os.open(alive, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for temp_file in self._folder.glob(f"{owner}-*.part"):
                    temp_file.unlink(missing_ok=True)
                alive.unlink(missing_ok=True)
            finally:
                os.close(lock)
