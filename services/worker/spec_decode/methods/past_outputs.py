"""Index over the outputs of finished sequences."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from quire.shared.columns import I32

MAX_MATCHES = 256  # occurrences of a token pair that are examined, the most recent ones
BOUNDARY = -1  # between outputs
NONE = -1
INDEXED_AT_ONCE = 4096  # tokens: 1.5 ms
Places = npt.NDArray[np.intp]


class PastOutputs:
    """Index of the most recent outputs in two generations: once the younger one is full, the older one is dropped."""

    def __init__(self, most: int, indexed_at_once: int = INDEXED_AT_ONCE) -> None:
        """`most`: outputs to keep; at least half of them are kept at any time. `indexed_at_once`: tokens."""
        self._indexed_at_once = indexed_at_once
        self._half = -(-most // 2)
        self._generations = [IndexedOutputs()]

    def add(self, output: I32) -> None:
        """Stores an output of at least two tokens, to be indexed by a later index(); does nothing if no outputs are
        kept."""
        if not self._half or len(output) < 2:
            return
        if self._generations[0].count == self._half:
            self._generations = [IndexedOutputs(), self._generations[0]]
        self._generations[0].add(output)

    def index(self) -> None:
        """Indexes a limited number of the added tokens. Steps with drafts call it, so that others pay nothing."""
        budget = self._indexed_at_once
        for generation in self._generations:
            budget -= generation.index(budget)

    def places(self, tokens: I32) -> Iterator[tuple[I32, Places]]:
        """Yields for each generation its text, and the positions in it at which the last two of `tokens` occur (the
        position of the last one); nothing for fewer than two tokens."""
        if len(tokens) >= 2:
            for generation in self._generations:
                yield generation.text, generation.places(int(tokens[-2]), int(tokens[-1]))


class IndexedOutputs:
    """Concatenated outputs with an index of their token pairs: the last position of each pair, and for each position
    the previous one of its pair. It allocates no object per pair: Python's garbage collector would traverse millions.
    """

    def __init__(self) -> None:
        self.count = 0
        self._tokens = np.full(1024, BOUNDARY, dtype=np.int32)
        self._before = array("i")  # previous position of the same pair; NONE: no earlier one
        self._length = 0
        self._last: dict[int, int] = {}  # last position by pair

    @property
    def text(self) -> I32:
        return self._tokens[: self._length]

    def places(self, first: int, second: int) -> Places:
        """Returns the last MAX_MATCHES positions of `second` right after `first`, ascending."""
        positions: list[int] = []
        place = self._last.get(_key(first, second), NONE)
        while place != NONE and len(positions) < MAX_MATCHES:
            positions.append(place)
            place = self._before[place]
        return np.array(positions[::-1], dtype=np.intp)

    def add(self, output: I32) -> None:
        """Appends an output and a boundary to the text, enlarging the buffer if needed. index() makes it searchable."""
        start, end = self._length, self._length + len(output)
        if end >= len(self._tokens):
            more = np.full(max(len(self._tokens), len(output) + 1), BOUNDARY, dtype=np.int32)
            self._tokens = np.concatenate([self._tokens, more])
        self._tokens[start:end] = output
        self._length = end + 1
        self.count += 1

    def index(self, most: int) -> int:
        """Indexes up to `most` tokens more; returns how many it indexed."""
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
    """Packs a token pair into one integer, the key of the index."""
    return first << 32 | second
