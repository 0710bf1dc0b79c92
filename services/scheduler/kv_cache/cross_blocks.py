"""Blocks of encoder outputs: keys and values that decoders attend to in cross attention.

The blocks of one item are allocated together when the first sequence with it is admitted, and are written before that
step. They never grow. Further sequences with the item share them: samples, beams, and other requests. Without users
they stay cached, under names that follow from the item's identifier, until their memory is needed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from quire.services.scheduler.kv_cache.block_pool import BlockPool
from quire.shared.kv.block_hash import page_name

PREFIX = b"quire/cross/1"


class CrossBlocks:
    """Owns the tables of encoder outputs of all slots; blocks come from the pool of the other KV groups."""

    def __init__(self, pool: BlockPool, group: int, block_size: int, num_slots: int) -> None:
        """`group`: index of the KV group, which is part of the blocks' names."""
        self._pool, self._group, self._block_size = pool, group, block_size
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_references = 0  # blocks over all tables; a block in several tables counts several times

    def table(self, slot: int) -> list[int]:
        """Returns the blocks of the item that the sequence in `slot` attends to."""
        return self._tables[slot]

    def is_cached(self, identifier: bytes, num_rows: int) -> bool:
        """Returns whether all blocks of an item hold their keys and values."""
        return None not in self._find(identifier, num_rows)

    def num_missing(self, identifier: bytes, num_rows: int) -> int:
        """Returns the number of free blocks that a sequence with the item takes: those to allocate, and cached ones
        without users."""
        found = self._find(identifier, num_rows)
        return sum(block is None or self._pool.references(block) == 0 for block in found)

    def admit(self, slot: int, identifier: bytes, num_rows: int) -> bool:
        """Gives a free slot the blocks of an item, allocating those that are not cached; the caller has checked that
        there are enough. Returns whether they have to be written."""
        assert not self._tables[slot], f"slot {slot} still has an item"
        names, found = self._names(identifier, num_rows), self._find(identifier, num_rows)
        self._pool.share(block for block in found if block is not None)
        missing = found.count(None)
        fresh = iter(self._pool.allocate(missing) if missing else ())
        table = [next(fresh) if block is None else block for block in found]
        for name, block, before in zip(names, table, found, strict=True):
            if before is None:
                self._pool.record_hash(block, name)
        self._tables[slot] = table
        self.num_references += len(table)
        return missing > 0

    def clear_slot(self, slot: int) -> list[int]:
        """Empties the slot's table; returns its blocks, last to first, for the caller to release."""
        blocks, self._tables[slot] = self._tables[slot][::-1], []
        self.num_references -= len(blocks)
        return blocks

    def owned(self) -> Iterable[int]:
        """Returns the blocks in all tables."""
        return (block for table in self._tables for block in table)

    def _find(self, identifier: bytes, num_rows: int) -> list[int | None]:
        """Returns the item's cached blocks, None for those that are not."""
        return [self._pool.find(name) for name in self._names(identifier, num_rows)]

    def _names(self, identifier: bytes, num_rows: int) -> list[bytes]:
        """Returns the names of the item's blocks."""
        parent = hashlib.sha256(PREFIX + identifier)
        names = []
        for index in range(-(-num_rows // self._block_size)):
            digest = parent.copy()
            digest.update(struct.pack("<I", index))
            names.append(page_name(digest.digest(), self._group))
        return names
