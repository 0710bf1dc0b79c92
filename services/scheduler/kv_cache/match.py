"""The blocks that hold the longest known prefix of a chain of hashes, kept up to date while a sequence waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.scheduler.kv_cache.block_pool import BlockPool

FEW = 32  # blocks, for which vector operations do not pay
NONE = np.zeros(0, dtype=np.intp)


class Match:
    """Whoever waits at the head of the queue is looked up in every step: update() costs what has changed since, and a
    few vector operations, however long the prefix is."""

    def __init__(self, pool: BlockPool, hashes: Sequence[bytes]) -> None:
        """`hashes` may grow at its end meanwhile."""
        self._pool = pool
        self._hashes = hashes
        self._as_of = 0  # of the pool's count of forgotten blocks
        self._ids = NONE  # the blocks, as far as they were needed in this form
        self.blocks: list[int] = []
        self.update()

    def update(self) -> None:
        """As if it were looked up anew."""
        pool = self._pool
        if self.blocks and self._as_of != pool.num_forgotten:
            gone = np.flatnonzero(pool.forgotten_at[self._columns()] > self._as_of)
            if len(gone):
                del self.blocks[gone[0] :]
                self._ids = self._ids[: gone[0]]
        self._as_of = pool.num_forgotten
        find, blocks, hashes = pool.find, self.blocks, self._hashes
        for index in range(len(blocks), len(hashes)):
            block = find(hashes[index])
            if block is None:
                break
            blocks.append(block)

    def shorten(self, num_blocks: int) -> None:
        """No more than so many of them are wanted, until the next update()."""
        del self.blocks[num_blocks:]
        self._ids = self._ids[:num_blocks]

    @property
    def num_free(self) -> int:
        """Blocks among them that nobody refers to."""
        if not self.blocks:
            return 0
        if len(self.blocks) < FEW:
            return sum(self._pool.references(block) == 0 for block in self.blocks)
        return int(np.count_nonzero(self._pool.references_of[self._columns()] == 0))

    def _columns(self) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        known = len(self._ids)
        if known < len(self.blocks):
            self._ids = np.concatenate([self._ids, np.array(self.blocks[known:], dtype=np.intp)])
        return self._ids
