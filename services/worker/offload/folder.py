"""The folder of one worker's blocks on disk: which files are whose, and what a worker that is started again finds.

    FOLDER/WORKER/lock                                      held while the worker lives
    FOLDER/WORKER/weights.json                              digests of the files of the weights, as they were read
    FOLDER/WORKER/IDENTITY-NUMBER/about.json                what the identity was made of, for people
    FOLDER/WORKER/IDENTITY-NUMBER/SHARE/PLACE-NAME.kv       a block (block_file.py), by its name (block_hash.py)

A forgotten cache begins a folder of another NUMBER, and the old one is removed beside the work. Whatever else lies in
WORKER is of another life and goes when the worker starts.
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
SHARE_BITS = 10  # a folder of at most so many places
LOCK, ABOUT, DIGESTS = "lock", "about.json", "weights.json"


class StoredBlock(NamedTuple):
    """A file of an earlier life that has the right name and size. What it holds is checked when it is read."""

    place: int
    name: bytes


class WorkerFolder:
    """Of one worker, for as long as a process has it."""

    def __init__(self, parent: Path, worker: str, field: str) -> None:
        """Raises InvalidArgument, naming the setting `field`, for what cannot be such a folder or is another's."""
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
            text = f"{field}: {str(self.path)!r} is another process's, which still runs"
            raise InvalidArgument(text, field=field) from None

    @property
    def digests(self) -> Path:
        """Where digests of the weights are noted."""
        return self.path / DIGESTS

    def close(self) -> None:
        os.close(self._lock)


class BlockFolder:
    """Of blocks, in a worker's own folder."""

    def __init__(self, own: WorkerFolder) -> None:
        self._folder, self._own = own, own.path
        self._identity, self._number = "", 0

    def open(
        self, identity: bytes, about: Mapping[str, object], num_places: int, block_bytes: int
    ) -> list[StoredBlock]:
        """What it holds of that identity, the least recently written first. All else is removed."""
        self._identity = identity.hex()
        self._number = max(self._numbers(), default=0)
        kept = self.current
        for path in self._own.iterdir():
            if path != kept and path.name not in (LOCK, DIGESTS):
                remove(path)
        kept.mkdir(mode=0o700, exist_ok=True)
        (kept / ABOUT).write_text(json.dumps(about, indent=1, sort_keys=True, default=str) + "\n")
        return _newest(_found(kept, num_places, HEADER_BYTES + block_bytes))

    def start_generation(self, identity: bytes) -> Path:
        """Another folder takes the place of the present one, which is returned."""
        old = self.current
        self._identity, self._number = identity.hex(), self._number + 1
        return old

    @property
    def current(self) -> Path:
        return self._own / f"{self._identity}-{self._number}"

    def close(self) -> None:
        self._folder.close()

    def _numbers(self) -> Iterator[int]:
        for path in self._own.iterdir():
            match = _GENERATION.fullmatch(path.name)
            if match and match[1] == self._identity:
                yield int(match[2])


def file_of(generation: Path, place: int, name: bytes) -> Path:
    return generation / f"{place >> SHARE_BITS:x}" / f"{place:08x}-{name.hex()}.kv"


def remove(path: Path) -> None:
    """As far as the disk lets it."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _found(generation: Path, num_places: int, num_bytes: int) -> Iterator[tuple[int, StoredBlock, Path]]:
    """With the time at which each was written. Files that cannot be blocks of this worker are removed."""
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
    """Of several with one place, or of one block, the newest."""
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
