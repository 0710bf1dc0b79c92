"""Host memory that outlives the worker process: a mapped file in a tmpfs, which a restarted worker finds.

    header        magic "QUIREHM" 2, places u64, bytes of a block u64, identity, boot, SHA-256 of these
    table         for each place: the block's hash, its KV group u64, an ascending number u64, SHA-256 of identity,
                  place and these
    content       one block per place

Each part begins at a multiple of 4096 bytes. An entry is cleared before its place is written and set after the write
has finished, so that a worker killed in between leaves an empty place. The content has no checksum: memory is assumed
to keep what was written. A reboot (`boot`) or other weights invalidate everything.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.services.worker.offload.folder import WorkerFolder
from quire.shared.errors import InvalidArgument
from quire.shared.kv.block_hash import page_name, page_of

MAGIC = b"QUIREHM\x02"
PAGE = 4096
_HEADER = struct.Struct("<8sQQ32s32s")
_ENTRY = struct.Struct("<32sQQ32s")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
FIELD = "kv_offloading_region"
FILE = "host-memory.kv"


class HostRegion:
    """Region owned by one process. Any thread may set and clear entries, one thread at a time per place."""

    def __init__(
        self, folder: WorkerFolder, identity: bytes, num_places: int, block_bytes: int, boot_id: Path = BOOT_ID
    ) -> None:
        """Maps the file and restores its entries, or creates it empty if size, identity or boot differ. `boot_id`: file
        that names the machine's boot. Raises InvalidArgument if there is no space, or if the folder is not in
        memory."""
        self._boot_id = boot_id
        self._identity, self._num_places, self._block_bytes = identity, num_places, block_bytes
        path = folder.path / FILE
        kind = file_system(folder.path)
        if kind not in ("tmpfs", "ramfs", "hugetlbfs"):
            text = f"{FIELD}: {str(folder.path)!r} is on {kind or 'an unknown file system'}: choose one in memory, as"
            raise InvalidArgument(f"{text} /dev/shm", field=FIELD)
        table = _whole_pages(num_places * _ENTRY.size)
        size = PAGE + table + num_places * block_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            is_valid = os.fstat(fd).st_size == size and os.pread(fd, PAGE, 0) == self._header()
            if not is_valid:
                os.ftruncate(fd, 0)
                os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)  # writing a page that cannot be allocated would kill the process
            self._map = mmap.mmap(fd, size)
        except OSError as error:
            os.ftruncate(fd, 0)
            text = (
                f"{FIELD}: {size / (1 << 30):.1f} GiB in {str(folder.path)!r}: {os.strerror(error.errno or errno.EIO)}"
            )
            raise InvalidArgument(text, field=FIELD) from None
        finally:
            os.close(fd)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self._table = whole[PAGE : PAGE + num_places * _ENTRY.size].reshape(num_places, _ENTRY.size)
        self.content: npt.NDArray[np.uint8] = whole[PAGE + table :].reshape(num_places, block_bytes)
        entries = self._read() if is_valid else []
        self.restored = {place: name for _, place, name in entries}  # oldest first
        self._numbers = itertools.count(entries[-1][0] + 1 if entries else 1)
        if not is_valid:
            self._map[:PAGE] = self._header()

    def clear(self, place: int) -> None:
        """Clears the entry of a place before it is written."""
        self._table[place] = 0

    def commit(self, place: int, name: bytes) -> None:
        """Sets the entry of a place that is completely written, with the next number, so that a restarted worker finds
        it."""
        number = next(self._numbers)
        group, block_hash = page_of(name)
        entry = _ENTRY.pack(block_hash, group, number, self._checksum(place, block_hash, group, number))
        self._table[place] = np.frombuffer(entry, dtype=np.uint8)

    def reset(self, identity: bytes) -> None:
        """Clears all entries; later entries belong to `identity`."""
        self._table[:] = 0
        self._identity = identity
        self._map[:PAGE] = self._header()

    def _read(self) -> list[tuple[int, int, bytes]]:
        """Returns (number, place, name) of all valid entries, oldest first."""
        entries = []
        for place in np.flatnonzero(self._table.any(axis=1)).tolist():
            block_hash, group, number, checksum = _ENTRY.unpack(self._table[place].tobytes())
            if checksum == self._checksum(place, block_hash, group, number):
                entries.append((number, place, page_name(block_hash, group)))
        return sorted(entries)

    def _checksum(self, place: int, block_hash: bytes, group: int, number: int) -> bytes:
        """Returns the SHA-256 that makes an entry valid for this identity and place."""
        return hashlib.sha256(self._identity + struct.pack("<QQQ", place, group, number) + block_hash).digest()

    def _header(self) -> bytes:
        """Returns the first page of the file: sizes, identity and boot, with a checksum."""
        boot = hashlib.sha256(_read(self._boot_id).encode()).digest()
        facts = _HEADER.pack(MAGIC, self._num_places, self._block_bytes, self._identity, boot)
        return (facts + hashlib.sha256(facts).digest()).ljust(PAGE, b"\0")


def existing_bytes(folder: WorkerFolder) -> int:
    """Returns the bytes of memory that an earlier process has left in the folder."""
    try:
        return (folder.path / FILE).stat().st_blocks * 512
    except OSError:
        return 0


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def file_system(folder: Path) -> str:
    """Returns the type of the folder's file system; "" if unknown."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _read(_MOUNTS).splitlines():
        fields = line.split(" ")
        if len(fields) > 2 and fields[2] == wanted and "-" in fields:
            return fields[fields.index("-") + 1]
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
