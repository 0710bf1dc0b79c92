"""How often blocks have been seen in prompts: what comes once need not be kept below the device."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable

MAX_COUNTED_BLOCKS = 64_000  # blocks that are counted; the one that was seen longest ago is forgotten first


class BlockFrequency:
    """Counts up to a threshold."""

    def __init__(self, threshold: int, most: int = MAX_COUNTED_BLOCKS) -> None:
        self._threshold, self._most = threshold, most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def count_prompt(self, hashes: Iterable[bytes]) -> list[bytes]:
        """They are in a prompt. Returns those that have been in enough of them just now."""
        reached, counts = [], self._counts
        for block_hash in hashes:
            count = counts.pop(block_hash, 0) + 1
            counts[block_hash] = count
            if count == self._threshold:
                reached.append(block_hash)
        while len(counts) > self._most:
            counts.popitem(last=False)
        return reached

    def num_leading(self, hashes: Iterable[bytes]) -> int:
        """How many blocks of a prompt, from its beginning, have been seen in others."""
        return sum(1 for _ in itertools.takewhile(self._counts.__contains__, hashes))

    def has_reached_threshold(self, block_hash: bytes) -> bool:
        return self._counts.get(block_hash, 0) >= self._threshold
