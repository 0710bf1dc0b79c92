"""File format of one KV block on disk.

    magic "QUIREKV" 2       8 bytes; the last is the version of this format
    bytes of the content    u64
    identity               32 bytes: layout of the content and the weights that computed it (identity.py)
    block hash             32 bytes: its tokens and all preceding ones (shared/kv/block_hash.py)
    KV group                u32
    content's SHA-256      32 bytes
    header's SHA-256       32 bytes, of all of the above
    content                keys, then values of each layer, in memory order

Integers are little-endian. A file is written under a temporary name and renamed when it is complete, without fsync:
checksums detect a file that a power failure left incomplete, like any other corruption.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from pathlib import Path

from quire.shared.kv.block_hash import page_of

_FACTS = struct.Struct("<8sQ32s32sI32s")
MAGIC = b"QUIREKV\x02"
DIGEST_BYTES = 32
HEADER_BYTES = _FACTS.size + DIGEST_BYTES

Content = memoryview | bytearray | bytes


class BlockMismatch(Exception):
    """The file does not hold the expected block; the message says how it differs."""


def header(identity: bytes, name: bytes, content: Content) -> bytes:
    """Returns the HEADER_BYTES that precede `content` in a file, with both checksums."""
    group, block_hash = page_of(name)
    facts = _FACTS.pack(MAGIC, len(content), identity, block_hash, group, hashlib.sha256(content).digest())
    return facts + hashlib.sha256(facts).digest()


def write(path: Path, head: bytes, content: Content) -> None:
    """Writes a new file that only its owner may access. Raises OSError and leaves no file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        _write_all(fd, head)
        _write_all(fd, content)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def read_into(path: Path, identity: bytes, name: bytes, content: bytearray) -> None:
    """Reads a file into `content` (bytearray of a block's size) and verifies identity, name, size and checksums. Raises
    BlockMismatch or OSError; `content` is then undefined."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BlockMismatch("it is not a regular file")
        head = bytearray(HEADER_BYTES)
        if _read_all(fd, head) < HEADER_BYTES:
            raise BlockMismatch("it is shorter than its header")
        expected = _check(head, identity, name, len(content))
        if _read_all(fd, content) < len(content) or os.read(fd, 1):
            raise BlockMismatch("its length differs from its header")
    finally:
        os.close(fd)
    if hashlib.sha256(content).digest() != expected:
        raise BlockMismatch("its content does not match its checksum")


def _check(head: bytearray, identity: bytes, wanted: bytes, num_bytes: int) -> bytes:
    """Validates the header against identity, name and size; returns the expected SHA-256 of the content. Raises
    BlockMismatch."""
    facts, digest = bytes(head[: _FACTS.size]), bytes(head[_FACTS.size :])
    magic, length, file_identity, block_hash, group, content = _FACTS.unpack(facts)
    if magic != MAGIC or hashlib.sha256(facts).digest() != digest:
        raise BlockMismatch("its header is corrupt")
    if file_identity != identity:
        raise BlockMismatch("it has other weights or another layout")
    if (group, block_hash) != page_of(wanted):
        raise BlockMismatch("it holds another block")
    if length != num_bytes:
        raise BlockMismatch(f"it holds {length} bytes, and a block has {num_bytes}")
    return bytes(content)


def _write_all(fd: int, content: Content) -> None:
    """Writes all bytes to `fd`, in several writes if necessary."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read_all(fd: int, content: bytearray) -> int:
    """Reads from `fd` until `content` is full or the file ends; returns the number of bytes read."""
    done, rest = 0, memoryview(content)
    while done < len(content):
        count = os.readv(fd, [rest[done:]])
        if not count:
            break
        done += count
    return done
