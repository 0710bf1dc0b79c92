"""Free block ids in the order of allocation: a doubly linked list over two arrays, every operation O(1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class FreeList:
    """List of block ids; the left end is allocated next. Ids are 0 to capacity - 1; each is in the list at most
    once."""

    def __init__(self, capacity: int, ids: range) -> None:
        """`ids`: initial content, in this order."""
        # The sentinel `capacity` precedes the first and follows the last id.
        self._end = capacity
        self._next = [capacity] * (capacity + 1)
        self._prev = [capacity] * (capacity + 1)
        self._size = len(ids)
        if ids:  # slices: a million ids at once would otherwise block the event loop
            self._next[ids.start : ids.stop] = range(ids.start + 1, ids.stop + 1)
            self._prev[ids.start : ids.stop] = range(ids.start - 1, ids.stop - 1)
            self._next[ids[-1]] = self._prev[ids[0]] = self._end
            self._next[self._end], self._prev[self._end] = ids[0], ids[-1]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """Yields the free ids in the order of allocation; the list must not change meanwhile."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def append(self, block: int) -> None:
        """Adds a block at the right end: allocated last."""
        self._insert(self._prev[self._end], block, self._end)

    def extend(self, blocks: Sequence[int]) -> None:
        """Adds blocks at the right end, in this order."""
        following, preceding = self._next, self._prev
        last = preceding[self._end]
        for block in blocks:
            following[last] = block
            preceding[block] = last
            last = block
        following[last] = self._end
        preceding[self._end] = last
        self._size += len(blocks)

    def prepend(self, block: int) -> None:
        """Adds a block at the left end: allocated next."""
        self._insert(self._end, block, self._next[self._end])

    def remove(self, block: int) -> None:
        """Unlinks an id that is in the list, which is not checked."""
        previous, following = self._prev[block], self._next[block]
        self._next[previous] = following
        self._prev[following] = previous
        self._size -= 1

    def popleft(self) -> int:
        """Removes and returns the id at the left end. Raises IndexError if the list is empty."""
        block = self._next[self._end]
        if block == self._end:
            raise IndexError("No free blocks available")
        self.remove(block)
        return block

    def popleft_n(self, count: int) -> list[int]:
        """Removes and returns `count` ids from the left end, in order. Raises IndexError, with nothing changed, if
        there are fewer."""
        if count > self._size:
            raise IndexError(f"No free blocks available: {count} asked for, {self._size} there")
        blocks = []
        following, block = self._next, self._next[self._end]
        for _ in range(count):
            blocks.append(block)
            block = following[block]
        following[self._end] = block
        self._prev[block] = self._end
        self._size -= count
        return blocks

    def _insert(self, previous: int, block: int, following: int) -> None:
        """Links an id between two neighbours, either of which may be the sentinel."""
        self._next[previous] = block
        self._prev[block] = previous
        self._next[block] = following
        self._prev[following] = block
        self._size += 1
