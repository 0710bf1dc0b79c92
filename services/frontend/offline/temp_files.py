"""Files that become something else when they are whole, in a folder that the frontends of a cluster share."""

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
NO_OWNER = "0" * 32  # where no lock can be had: what it leaves behind is not swept


class TempFiles:
    """Of one life of a frontend: FOLDER/OWNER-ID.part, and FOLDER.owners/OWNER, which it has locked for as long as it
    lives. What lives that are over have left behind, cut off in the middle, is swept when the next one begins."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._owner = folder, NO_OWNER
        self._owners = folder.with_name(f"{folder.name}.owners")
        try:
            self._owners.mkdir(mode=0o700, exist_ok=True)
            self._owner = self._begin()
            self._sweep()
        except OSError as error:  # which may be mended while it runs
            log.warning("what uploads have left behind is not swept", folder=str(folder), reason=str(error))

    def new(self) -> Path:
        """The name of one that nobody has."""
        return self._folder / f"{self._owner}-{uuid.uuid4().hex}.part"

    def _begin(self) -> str:
        while True:
            owner = uuid.uuid4().hex
            path = self._owners / owner
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():  # nobody has swept it before it was locked
                return owner

    def _sweep(self) -> None:
        for path in [*self._owners.iterdir()]:
            if _OWNER.fullmatch(path.name) and path.name != self._owner:
                self._sweep_of(path.name, path)

    def _sweep_of(self, owner: str, alive: Path) -> None:
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another one sweeps as well; it lives
            lock = os.open(alive, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in self._folder.glob(f"{owner}-*.part"):
                    left.unlink(missing_ok=True)
                alive.unlink(missing_ok=True)
            finally:
                os.close(lock)
