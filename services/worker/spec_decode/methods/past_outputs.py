"""Outputs of sequences that have ended, to be searched."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from quire.shared.columns import I32

MAX_MATCHES = 256  # of a pair of tokens that are looked at; the most recent ones
BOUNDARY = -1  # between outputs
NONE = -1
INDEXED_AT_ONCE = 4096  # tokens: 1.5 ms
Places = npt.NDArray[np.intp]


class PastOutputs:
    """The last so many outputs, in two generations: when the younger is full, the elder is forgotten."""

    def __init__(self, most: int) -> None:
        """`most`: outputs remembered; at least half of them are at any time, once there were as many."""
        self._half = -(-most // 2)
        self._generations = [IndexedOutputs()]

    def add(self, output: I32) -> None:
        if not self._half or len(output) < 2:
            return
        if self._generations[0].count == self._half:
            self._generations = [IndexedOutputs(), self._generations[0]]
        self._generations[0].add(output)

    def index(self) -> None:
        """Some of what was added: before steps that draft, so that others pay nothing."""
        left = INDEXED_AT_ONCE
        for generation in self._generations:
            left -= generation.index(left)

    def places(self, tokens: I32) -> Iterator[tuple[I32, Places]]:
        """Texts, and where the last of `tokens` stands in them behind the last but one."""
        if len(tokens) >= 2:
            for generation in self._generations:
                yield generation.text, generation.places(int(tokens[-2]), int(tokens[-1]))


class IndexedOutputs:
    """Outputs, end to end, with an index of the pairs of tokens in them: the last place of each, and from each place
    the one before it. Nothing here is an object for each pair, of which there are millions to be walked by Python's
    garbage collector."""

    def __init__(self) -> None:
        self.count = 0
        self._tokens = np.full(1024, BOUNDARY, dtype=np.int32)
        self._before = array("i")  # of each place; NONE: no earlier one
        self._length = 0
        self._last: dict[int, int] = {}  # by pair

    @property
    def text(self) -> I32:
        return self._tokens[: self._length]

    def places(self, first: int, second: int) -> Places:
        """Ascending."""
        found: list[int] = []
        place = self._last.get(_key(first, second), NONE)
        while place != NONE and len(found) < MAX_MATCHES:
            found.append(place)
            place = self._before[place]
        return np.array(found[::-1], dtype=np.intp)

    def add(self, output: I32) -> None:
        start, end = self._length, self._length + len(output)
        if end >= len(self._tokens):
            more = np.full(max(len(self._tokens), len(output) + 1), BOUNDARY, dtype=np.int32)
            self._tokens = np.concatenate([self._tokens, more])
        self._tokens[start:end] = output
        self._length = end + 1
        self.count += 1

    def index(self, most: int) -> int:
        """Up to `most` tokens more; how many there were."""
        begin, end = len(self._before), min(len(self._before) + most, self._length)
        last, before = self._last, self._before
        first = int(self._tokens[begin - 1]) if begin else BOUNDARY
        for place, second in enumerate(self._tokens[begin:end].tolist(), begin):
            if BOUNDARY in (first, second):
                before.append(NONE)
            else:
                key = _key(first, second)
                before.append(last.get(key, NONE))
                last[key] = place
            first = second
        return end - begin


def _key(first: int, second: int) -> int:
    return first << 32 | second
