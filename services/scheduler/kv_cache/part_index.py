"""Which blocks begin with which tokens: what a sequence may start from behind the last whole block that is cached.

Content is 32 bytes for all that comes before the block (its parent's hash, or the root), then the tokens that it holds
from its first position on, as an i32 column. A block is entered under its first `grain` tokens; of several that begin
alike the latest is found there, and they are entered under `grain` tokens more as well, and so on.

The keys are Python's own hashes. Other content may have the same, which costs a hit and no more: content is compared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PARENT_BYTES = 32
TOKEN_BYTES = 4


class BlockPart(NamedTuple):
    """The beginning of a block."""

    block: int
    num_tokens: int
    is_all: bool  # that the block is known to hold


class PartIndex:
    """Content is noted when a step is ordered that computes it, and found once that is published: copies are made
    before a step computes anything."""

    def __init__(self, block_size: int, grain: int) -> None:
        self._stride = grain * TOKEN_BYTES
        self._first = PARENT_BYTES + self._stride  # bytes of the shortest key
        self._longest = PARENT_BYTES + (block_size - 1) * TOKEN_BYTES  # whole blocks are found by their hashes
        self.newest: dict[int, int] = {}
        self.older: dict[int, dict[int, None]] = {}  # by key: others that are entered under it, latest last
        self._contents: dict[int, bytes] = {}
        self._deepest: dict[int, int] = {}  # bytes of the longest key that each block has been entered under
        self._noted: dict[int, bytes] = {}

    def note(self, block: int, content: bytes) -> None:
        """In place of what was known of the block, which it continues."""
        self._noted[block] = content

    def publish(self) -> None:
        """All that was noted is computed before what is ordered from here on."""
        if self._noted:
            for block, content in self._noted.items():
                self._enter(block, content)
            self._noted.clear()

    def find(self, content: bytes) -> BlockPart | None:
        """The block with the longest known beginning of `content`, at least a grain."""
        found = None
        for end in range(self._first, min(len(content), self._longest) + 1, self._stride):
            block = self.newest.get(hash(content[:end]))
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
        """It will hold something else."""
        self._noted.pop(block, None)
        content = self._contents.pop(block, None)
        if content is None:
            return
        for end in range(self._first, self._deepest.pop(block) + 1, self._stride):
            self._remove(hash(content[:end]), block)

    def _remove(self, key: int, block: int) -> None:
        """`block` is not entered under `key` any more; the one before it is found again."""
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
        self._contents[block] = content
        end = self._first
        for end in range(self._first, min(len(content), self._longest) + 1, self._stride):
            key = hash(content[:end])
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
        """Another block begins alike: what tells them apart comes later."""
        content = self._contents[block]
        if end <= min(len(content), self._longest):
            key = hash(content[:end])
            if self.newest.setdefault(key, block) != block:
                self.older.setdefault(key, {}).setdefault(block)
            self._deepest[block] = max(self._deepest[block], end)


def _num_common(held: bytes, wanted: bytes) -> int:
    """Bytes that both begin with, in whole tokens."""
    length = min(len(held), len(wanted))
    if held[:length] == wanted[:length]:
        return length
    differs = np.frombuffer(held[:length], np.int32) != np.frombuffer(wanted[:length], np.int32)
    return int(differs.argmax()) * TOKEN_BYTES
