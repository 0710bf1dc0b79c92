"""Folder of one worker's blocks on disk, and what a restarted worker finds in it.

    FOLDER/WORKER/lock                                      held while the worker runs
    FOLDER/WORKER/weights.json                              digests of the files of the weights, as they were read
    FOLDER/WORKER/IDENTITY-NUMBER/about.json                readable description of the identity
    FOLDER/WORKER/IDENTITY-NUMBER/SHARE/PLACE-NAME.kv       a block (block_file.py), by its name (block_hash.py)

Resetting the cache starts a folder with the next NUMBER and removes the old one in the background. Everything else in
WORKER belongs to an earlier process and is removed at start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from quire.services.worker.offload.block_file import HEADER_BYTES
from quire.shared.errors import InvalidArgument

_BLOCK = re.compile(r"([0-9a-f]{8})-((?:[0-9a-f]{2})?[0-9a-f]{64})\.kv")
_GENERATION = re.compile(r"([0-9a-f]{64})-([0-9]{1,9})")
SHARE_BITS = 10  # log2 of the places per folder
LOCK, ABOUT, DIGESTS = "lock", "about.json", "weights.json"


class StoredBlock(NamedTuple):
    """A file of an earlier process with a valid name and size. Its content is verified when it is read."""

    place: int
    name: bytes


class WorkerFolder:
    """Folder of one worker, locked by its process until close(), so that no other process uses it."""

    def __init__(self, parent: Path, worker: str, field: str) -> None:
        """Creates and locks the folder. Raises InvalidArgument, naming the setting `field`, if that fails or another
        process holds the lock."""
        self.path = parent / quote(worker, safe="")
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self.path.chmod(0o700)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise InvalidArgument(f"{field}: {str(self.path)!r}: {error.strerror}", field=field) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            text = f"{field}: {str(self.path)!r} is in use by another process"
            raise InvalidArgument(text, field=field) from None

    @property
    def digests(self) -> Path:
        """File that caches digests of the weights."""
        return self.path / DIGESTS

    def close(self) -> None:
        os.close(self._lock)


class BlockFolder:
    """Block files of the current identity and generation within a worker's folder."""

    def __init__(self, own: WorkerFolder) -> None:
        self._folder, self._own = own, own.path
        self._identity, self._number = "", 0

    def open(
        self, identity: bytes, about: Mapping[str, object], num_places: int, block_bytes: int
    ) -> list[StoredBlock]:
        """Selects the newest generation of `identity`, or a new one, and writes its description `about`. Returns its
        stored blocks, least recently written first; removes other generations and files that are no blocks."""
        self._identity = identity.hex()
        self._number = max(self._numbers(), default=0)
        current = self.current
        for path in self._own.iterdir():
            if path != current and path.name not in (LOCK, DIGESTS):
                remove(path)
        current.mkdir(mode=0o700, exist_ok=True)
        (current / ABOUT).write_text(json.dumps(about, indent=1, sort_keys=True, default=str) + "\n")
        return _newest(_stored_blocks(current, num_places, HEADER_BYTES + block_bytes))

    def start_generation(self, identity: bytes) -> Path:
        """Selects the next generation, of `identity`, and returns the previous folder, which the caller removes."""
        old = self.current
        self._identity, self._number = identity.hex(), self._number + 1
        return old

    @property
    def current(self) -> Path:
        return self._own / f"{self._identity}-{self._number}"

    def close(self) -> None:
        """Unlocks the worker's folder."""
        self._folder.close()

    def _numbers(self) -> Iterator[int]:
        """Yields the numbers of the existing generations of the current identity."""
        for path in self._own.iterdir():
            match = _GENERATION.fullmatch(path.name)
            if match and match[1] == self._identity:
                yield int(match[2])


def file_of(generation: Path, place: int, name: bytes) -> Path:
    """Returns the path of a block's file in a generation's folder, by place and name."""
    return generation / f"{place >> SHARE_BITS:x}" / f"{place:08x}-{name.hex()}.kv"


def remove(path: Path) -> None:
    """Removes a file or folder, as far as the disk permits."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _stored_blocks(generation: Path, num_places: int, num_bytes: int) -> Iterator[tuple[int, StoredBlock, Path]]:
    """Yields (modification time, block, path) of all stored blocks; removes files that cannot be blocks of
    this worker."""
    for share in generation.iterdir():
        if not share.is_dir():
            continue
        for path in share.iterdir():
            match, status = _BLOCK.fullmatch(path.name), path.lstat()
            place = int(match[1], 16) if match else num_places
            if match and place < num_places and stat.S_ISREG(status.st_mode) and status.st_size == num_bytes:
                yield status.st_mtime_ns, StoredBlock(place, bytes.fromhex(match[2])), path
            else:
                remove(path)


def _newest(found: Iterator[tuple[int, StoredBlock, Path]]) -> list[StoredBlock]:
    """Returns the newest file of each place and of each block, oldest first; removes the others."""
    places: set[int] = set()
    names: set[bytes] = set()
    kept = []
    for _, block, path in sorted(found, key=lambda row: row[0], reverse=True):
        if block.place in places or block.name in names:
            remove(path)
            continue
        places.add(block.place)
        names.add(block.name)
        kept.append(block)
    return kept[::-1]
