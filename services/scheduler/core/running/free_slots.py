"""Allocator of free slots by micro-batch."""

from __future__ import annotations

import heapq


class FreeSlots:
    """One heap of free slots per micro-batch; slot s belongs to micro-batch s % num_micro_batches."""

    def __init__(self, num_slots: int, num_micro_batches: int) -> None:
        self._heaps = [list(range(first, num_slots, num_micro_batches)) for first in range(num_micro_batches)]
        self._num_free = num_slots

    def __len__(self) -> int:
        return self._num_free

    def count(self, micro_batch: int) -> int:
        return len(self._heaps[micro_batch])

    def allocate(self, micro_batch: int) -> int:
        """Takes the lowest free slot of a micro-batch; if it has none, of the micro-batch with the most free slots."""
        heap = self._heaps[micro_batch] or max(self._heaps, key=len)
        self._num_free -= 1
        return heapq.heappop(heap)

    def free(self, slot: int) -> None:
        heapq.heappush(self._heaps[slot % len(self._heaps)], slot)
        self._num_free += 1
