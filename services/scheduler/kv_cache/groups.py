"""The KV groups of a worker: what each needs of the tokens before, and what that costs in pages.

A block position is given to a sequence in all groups at once, a page for each; so all groups have room for as many
tokens. They differ in what they give back: whoever looks through a window needs the last pages only. One small class
for each kind of spec says which pages that are (shared/kv/kv_retention.py); matching, sliding and cost follow.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.shared.kv.kv_retention import Retention, StateRetention, WindowRetention, longest_match, retention_of
from quire.shared.kv.kv_specs import NOTHING, ONE_FULL, KVSpec

BlockArray = npt.NDArray[Any]  # integers, or floats where half a block counts as such
ALL_BLOCKS = range(1 << 40)


@dataclass(frozen=True)
class KVGroups:
    """All groups of a worker, and how a step may be cut."""

    specs: tuple[KVSpec, ...]
    block_size: int
    max_num_batched_tokens: int

    @cached_property
    def num(self) -> int:
        return len(self.specs)

    @cached_property
    def plain(self) -> bool:
        """One group that keeps everything: the usual case."""
        return self.specs == ONE_FULL or (self.num == 1 and not self.has_windows and not self.keep_nothing)

    @cached_property
    def keep_nothing(self) -> bool:
        """Sequences are computed whole and have no blocks."""
        return self.specs == (NOTHING,)

    @cached_property
    def has_windows(self) -> bool:
        return bool(self.windows)

    @cached_property
    def has_states(self) -> bool:
        """Tokens change a state: none can be computed a second time, and a state can be read by later steps only."""
        return any(isinstance(kept, StateRetention) for kept in self.retentions)

    @cached_property
    def retentions(self) -> tuple[Retention, ...]:
        return tuple(retention_of(spec, self.block_size) for spec in self.specs)

    @cached_property
    def windows(self) -> dict[WindowRetention, tuple[int, ...]]:
        """Which groups have each; that of a state reaches to the token before."""
        found: dict[WindowRetention, tuple[int, ...]] = {}
        for group, kept in enumerate(self.retentions):
            if isinstance(kept, WindowRetention):
                found[kept] = (*found.get(kept, ()), group)
        return found

    @cached_property
    def _chunk(self) -> int:
        """Block positions that the largest chunk touches."""
        return -(-self.max_num_batched_tokens // self.block_size) + 1

    def cost(self, num_blocks: int) -> int:
        """Pages for so many block positions, computed in chunks as large as a step."""
        return num_blocks if self.plain else sum(kept.cost(num_blocks, self._chunk) for kept in self.retentions)

    def least_cost(self, num_blocks: int) -> int:
        """Pages without which so many positions cannot be computed, however small the chunks are."""
        return num_blocks if self.plain else sum(kept.cost(num_blocks, 1) for kept in self.retentions)

    def max_sequence_tokens(self, num_pages: int, max_model_len: int) -> int:
        """Tokens that a sequence can have with so many pages, at most `max_model_len`."""
        most = -(-max_model_len // self.block_size)
        if self.least_cost(most) <= num_pages:
            return max_model_len
        low, high = 0, most
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.least_cost(middle) <= num_pages else (low, middle)
        return low * self.block_size

    def peak(self, num_blocks: BlockArray, num_sequences: BlockArray) -> BlockArray:
        """Pages for `num_blocks` positions of `num_sequences` together, at most; element by element."""
        if self.plain:
            return num_blocks
        pages: BlockArray = np.zeros_like(num_blocks)
        for kept in self.retentions:
            most = num_sequences * kept.cost(1 << 40, self._chunk) if isinstance(kept, WindowRetention) else num_blocks
            pages = pages + np.minimum(num_blocks, most)
        return pages

    def match(self, found: Callable[[int, int], bool], num_blocks: int) -> int:
        """Leading block positions that a sequence can start behind in every group. `found`: of group and position."""
        return longest_match(self.retentions, found, num_blocks)

    def pages_behind(self, ends: Iterable[int]) -> tuple[Container[int], ...]:
        """Of each group the block positions whose pages somebody reads who starts behind one of so many leading
        blocks; of a group that keeps everything all of them."""
        ends = tuple(ends)
        return tuple(
            frozenset(block for end in ends for block in range(kept.first_needed(end), end))
            if isinstance(kept, WindowRetention)
            else ALL_BLOCKS
            for kept in self.retentions
        )
