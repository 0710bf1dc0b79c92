"""Longest cached prefix of a hash chain, kept up to date while a sequence waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.services.scheduler.kv_cache.block_pool import NULL_BLOCK, BlockPool
from quire.services.scheduler.kv_cache.groups import KVGroups
from quire.shared.kv.block_hash import page_name

MIN_VECTOR_BLOCKS = 32  # below this many blocks, vector operations do not pay
NONE = np.zeros(0, dtype=np.intp)


class Match(Protocol):
    """Cached blocks that a sequence may start with."""

    blocks: list[int]  # in the layout of a block table
    num_null: int  # null blocks among them (slid out of the window)

    def refresh(self) -> None:
        """Updates the match to the current state of the cache."""

    def truncate(self, num_blocks: int) -> None:
        """Limits the match to `num_blocks` block positions until the next refresh()."""

    @property
    def num_free(self) -> int:
        """Number of matched blocks without references."""


class SingleGroupMatch:
    """Match for a single full-attention group. The head of the queue is matched in every step: refresh() costs what has
    changed since, and a few vector operations, however long the prefix is."""

    __slots__ = ("_as_of", "_hashes", "_ids", "_pool", "blocks", "num_null")

    def __init__(self, pool: BlockPool, hashes: Sequence[bytes]) -> None:
        """Looks the longest match up at once. `hashes`: a hash chain, which may grow at its end meanwhile."""
        self._pool = pool
        self._hashes = hashes
        self._as_of = 0  # value of the pool's num_forgotten
        self._ids = NONE  # the blocks as an array, as far as it was needed
        self.num_null = 0
        self.blocks: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        """Updates the match to the current state of the cache."""
        pool = self._pool
        if self.blocks and self._as_of != pool.num_forgotten:
            evicted = np.flatnonzero(pool.forgotten_at[self._columns()] > self._as_of)
            if len(evicted):
                del self.blocks[evicted[0] :]
                self._ids = self._ids[: evicted[0]]
        self._as_of = pool.num_forgotten
        find, blocks, hashes = pool.find, self.blocks, self._hashes
        for index in range(len(blocks), len(hashes)):
            block = find(hashes[index])
            if block is None:
                break
            blocks.append(block)

    def truncate(self, num_blocks: int) -> None:
        """Limits the match to `num_blocks` blocks until the next refresh()."""
        del self.blocks[num_blocks:]
        self._ids = self._ids[:num_blocks]

    @property
    def num_free(self) -> int:
        """Number of matched blocks without references."""
        if not self.blocks:
            return 0
        if len(self.blocks) < MIN_VECTOR_BLOCKS:
            return sum(self._pool.references(block) == 0 for block in self.blocks)
        return int(np.count_nonzero(self._pool.references_of[self._columns()] == 0))

    def _columns(self) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """Returns the matched blocks as an array, extended by those found since the last call."""
        known = len(self._ids)
        if known < len(self.blocks):
            self._ids = np.concatenate([self._ids, np.array(self.blocks[known:], dtype=np.intp)])
        return self._ids


class MultiGroupMatch:
    """Match for any KV groups, looked up again whenever the cache has changed."""

    def __init__(self, pool: BlockPool, groups: KVGroups, hashes: Sequence[bytes]) -> None:
        """Looks the longest match up at once. `hashes`: a hash chain, which may grow at its end meanwhile."""
        self._pool, self._groups, self._hashes = pool, groups, hashes
        self._as_of: tuple[int, int, int] | None = None
        self.blocks: list[int] = []
        self.num_null = 0
        self.refresh()

    def refresh(self) -> None:
        """Looks the match up again if the cache has changed or the hash chain has grown since the last time."""
        now = *self._pool.version, len(self._hashes)
        if self._as_of != now:
            self._look_up(len(self._hashes))
            self._as_of = now

    def truncate(self, num_blocks: int) -> None:
        """Looks up a match of at most `num_blocks` block positions, which may be shorter, because windows need other
        pages there; the next refresh() lifts the limit."""
        if len(self.blocks) > num_blocks * self._groups.num:
            self._look_up(num_blocks)
            self._as_of = None

    @property
    def num_free(self) -> int:
        return sum(self._pool.references(block) == 0 for block in self.blocks if block)

    def _look_up(self, most: int) -> None:
        """Replaces the match by the longest one, of at most `most` block positions, that all KV groups can continue
        from; null blocks stand for pages that no group needs."""
        groups, pool, hashes = self._groups, self._pool, self._hashes
        end = groups.match(lambda group, block: pool.find(page_name(hashes[block], group)) is not None, most)
        firsts = [kept.first_needed(end) for kept in groups.retentions]
        pages = [
            pool.find(page_name(hashes[block], group)) if block >= first else NULL_BLOCK
            for block in range(end)
            for group, first in enumerate(firsts)
        ]
        self.blocks = [page for page in pages if page is not None]
        assert len(self.blocks) == len(pages), "all of them were found"
        self.num_null = self.blocks.count(NULL_BLOCK)
