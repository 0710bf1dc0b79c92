"""Counts in how many prompts each block occurs: blocks that occur only once need not be stored below the device."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable

MAX_COUNTED_BLOCKS = 64_000  # maximum number of counted blocks; the least recently seen one is dropped first


class BlockFrequency:
    """Numbers of prompts in which blocks have occurred, by hash, compared with a threshold; those counted longest
    ago are forgotten."""

    def __init__(self, threshold: int, most: int = MAX_COUNTED_BLOCKS) -> None:
        self._threshold, self._most = threshold, most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def count_prompt(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Counts one more prompt for each of its blocks; returns those that reach the threshold with it. Blocks that
        were counted longest ago are forgotten beyond the maximum number."""
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
        """Returns the number of leading blocks of a prompt that occurred in earlier prompts."""
        return sum(1 for _ in itertools.takewhile(self._counts.__contains__, hashes))

    def has_reached_threshold(self, block_hash: bytes) -> bool:
        return self._counts.get(block_hash, 0) >= self._threshold
