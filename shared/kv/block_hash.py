"""Hash of a KV block's content, scheme "sha256/1": a canonical function of bytes, equal in every process.

    root     = SHA-256("quire/block/1" · len(adapter) · adapter · len(salt) · salt)   lengths u32, texts UTF-8
    hash(i)  = SHA-256(hash(i - 1) · tokens of block i as i32 · media of block i)      hash(-1) = root
    media    = identifier · (offset of the item - position of the block's first token) as i32, for each media item
               that overlaps the block, by offset; empty in blocks without media

All integers are little-endian. Only full blocks have a hash. The hash is cryptographic because tenants share the
cache: a block that is found by its hash holds exactly these tokens after this prefix. Test vectors:
protos/README.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.shared.columns import u32, u32_bytes

SCHEME = "sha256/1"
HASH_BYTES = 32
TOKEN_BYTES = 4


def root_hash(adapter: str = "", salt: str = "") -> bytes:
    """Returns the hash before a sequence's first block, which keeps adapters (adapter_ids.hash_text) and cache salts
    apart."""
    parts = [b"quire/block/1"]
    for text in (adapter, salt):
        raw = text.encode()
        parts += [struct.pack("<I", len(raw)), raw]
    return hashlib.sha256(b"".join(parts)).digest()


class MediaRange(Protocol):
    """Position of a media item in a sequence, in tokens [offset, offset + length)."""

    @property
    def identifier(self) -> bytes:
        """Returns the 32 bytes that equal items have in common."""

    @property
    def offset(self) -> int:
        """Returns the position of the item's first token."""

    @property
    def length(self) -> int:
        """Returns the number of tokens in the item's place."""


def block_hash(parent: bytes, tokens: bytes, media: bytes = b"") -> bytes:
    """Returns the hash of one full block; `tokens` is an i32 column, `media` as media_of() returns it."""
    return hashlib.sha256(parent + tokens + media).digest()


def media_of(items: Iterable[MediaRange], begin: int, end: int) -> bytes:
    """Returns the part of a block's hash that tells its media apart. `begin`, `end`: positions of the block."""
    return b"".join(
        item.identifier + struct.pack("<i", item.offset - begin)
        for item in items
        if item.offset < end and item.offset + item.length > begin
    )


def chain_with_media(
    parent: bytes, tokens: bytes, block_size: int, items: Sequence[MediaRange], start: int = 0
) -> list[bytes]:
    """Returns the hashes as chain() does, for a sequence with media `items`, by offset. `start`: position of the first
    of `tokens` in the sequence."""
    if not items:
        return chain(parent, tokens, block_size)
    stride, hashes = block_size * TOKEN_BYTES, list[bytes]()
    for number, at in enumerate(range(0, len(tokens) - stride + 1, stride)):
        begin = start + number * block_size
        parent = block_hash(parent, tokens[at : at + stride], media_of(items, begin, begin + block_size))
        hashes.append(parent)
    return hashes


def chain(parent: bytes, tokens: bytes, block_size: int) -> list[bytes]:
    """Returns the hashes of the full blocks of `tokens` (an i32 column) that follow `parent`."""
    sha256 = hashlib.sha256
    stride = block_size * TOKEN_BYTES
    hashes = []
    for start in range(0, len(tokens) - stride + 1, stride):
        parent = sha256(parent + tokens[start : start + stride]).digest()
        hashes.append(parent)
    return hashes


def split(column: bytes) -> list[bytes]:
    """Splits a column of 32-byte hashes."""
    return [column[i : i + HASH_BYTES] for i in range(0, len(column), HASH_BYTES)]


def page_name(digest: bytes, group: int) -> bytes:
    """Returns the name of a block's page in one KV group: the hash in group 0, the group number and the hash in
    others."""
    return digest if group == 0 else bytes((group,)) + digest


def page_of(name: bytes) -> tuple[int, bytes]:
    """Returns the group and the hash that a page name stands for."""
    return (0, name) if len(name) == HASH_BYTES else (name[0], name[1:])


def split_names(hashes: bytes, groups: bytes) -> list[bytes]:
    """Returns page names from two columns: 32-byte hashes, and groups as u32; without groups all belong to group 0."""
    if not groups:
        return split(hashes)
    return [page_name(digest, group) for digest, group in zip(split(hashes), u32(groups).tolist(), strict=True)]


def join_names(names: Iterable[bytes]) -> tuple[bytes, bytes]:
    """Returns page names as the two columns that split_names() reads; the groups are empty if all are 0."""
    pages = [page_of(name) for name in names]
    groups = [group for group, _ in pages]
    return b"".join(digest for _, digest in pages), u32_bytes(groups) if any(groups) else b""
