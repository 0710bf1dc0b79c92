"""Index of block contents by their first tokens: finds the block to copy when a prompt continues within a block.

Content is 32 bytes for everything before the block (its parent's hash, or the root), then the tokens that it holds from
its first position on, as an i32 column. A block is indexed under its first `grain` tokens; of several blocks with the
same beginning the latest is found there, and they are indexed under `grain` more tokens as well, and so on.

The keys are Python hashes. A collision costs a hit and nothing more: contents are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

PARENT_BYTES = 32
TOKEN_BYTES = 4


class BlockPart(NamedTuple):
    """Block whose content begins like a prompt's next tokens, and the number of those that match."""

    block: int
    num_tokens: int
    is_all: bool  # whether the match covers everything that the block holds


class PartIndex:
    """Content is noted when a step that computes it is planned, and can be found once it is published: copies are
    executed before a step computes anything."""

    def __init__(self, block_size: int, grain: int, key_of: Callable[[bytes], int] = hash) -> None:
        """Creates an empty index. `grain`: tokens by which keys differ in length, and the shortest match that is
        found; `key_of`: hash function of content."""
        self._key_of = key_of
        self._stride = grain * TOKEN_BYTES
        self._first = PARENT_BYTES + self._stride  # bytes of the shortest key
        self._longest = PARENT_BYTES + (block_size - 1) * TOKEN_BYTES  # whole blocks are found by their hashes
        self.newest: dict[int, int] = {}
        self.older: dict[int, dict[int, None]] = {}  # other blocks by key, latest last
        self._contents: dict[int, bytes] = {}
        self._deepest: dict[int, int] = {}  # bytes of the longest key of each block
        self._noted: dict[int, bytes] = {}

    def note(self, block: int, content: bytes) -> None:
        """Notes the content of a block; it extends what was known of the block."""
        self._noted[block] = content

    def publish(self) -> None:
        """Makes the noted content findable: it is computed before everything planned from now on."""
        if self._noted:
            for block, content in self._noted.items():
                self._enter(block, content)
            self._noted.clear()

    def find(self, content: bytes) -> BlockPart | None:
        """Returns the block whose content has the longest common beginning with `content`, in whole tokens; None if
        that is shorter than a grain. Only published content is found."""
        found = None
        for end in range(self._first, min(len(content), self._longest) + 1, self._stride):
            block = self.newest.get(self._key_of(content[:end]))
            if block is None:
                break
            found = block
        if found is None:
            return None
        held = self._contents[found]
        num_common = _num_common(held, content)
        if num_common < self._first:
            return None
        is_all = num_common == len(held) and found not in self._noted
        return BlockPart(found, (num_common - PARENT_BYTES) // TOKEN_BYTES, is_all)

    def remove(self, block: int) -> None:
        """Removes a block whose content will be overwritten, noted or published; does nothing if it is unknown."""
        self._noted.pop(block, None)
        content = self._contents.pop(block, None)
        if content is None:
            return
        for end in range(self._first, self._deepest.pop(block) + 1, self._stride):
            self._remove(self._key_of(content[:end]), block)

    def _remove(self, key: int, block: int) -> None:
        """Removes `block` from `key`; the previous block of the key is found again."""
        older = self.older.get(key)
        if self.newest.get(key) != block:
            if older is not None:
                older.pop(block, None)
        elif older is None:
            del self.newest[key]
        else:
            self.newest[key], _ = older.popitem()
        if older is not None and not older:
            del self.older[key]

    def _enter(self, block: int, content: bytes) -> None:
        """Indexes a block under its beginnings, up to the first one that no other block has; a block found there so
        far stays as an older one and is indexed one stride deeper."""
        self._contents[block] = content
        end = self._first
        for end in range(self._first, min(len(content), self._longest) + 1, self._stride):
            key = self._key_of(content[:end])
            other = self.newest.get(key)
            self.newest[key] = block
            if other is None:
                break
            if other != block:
                older = self.older.setdefault(key, {})
                older.pop(block, None)
                older[other] = None
                self._deepen(other, end + self._stride)
        self._deepest[block] = max(self._deepest.get(block, 0), end)

    def _deepen(self, block: int, end: int) -> None:
        """Indexes `block` under a longer key, because another block has the same beginning."""
        content = self._contents[block]
        if end <= min(len(content), self._longest):
            key = self._key_of(content[:end])
            if self.newest.setdefault(key, block) != block:
                self.older.setdefault(key, {}).setdefault(block)
            self._deepest[block] = max(self._deepest[block], end)


def _num_common(held: bytes, wanted: bytes) -> int:
    """Returns the length of the common prefix in bytes, in whole tokens."""
    length = min(len(held), len(wanted))
    if held[:length] == wanted[:length]:
        return length
    differs = np.frombuffer(held[:length], np.int32) != np.frombuffer(wanted[:length], np.int32)
    return int(differs.argmax()) * TOKEN_BYTES
