"""KV groups of a worker: which earlier tokens each layer group needs, and its cost in pages.

A block position is allocated to a sequence in all groups at once, one page for each, so all groups have room for
equally many tokens. They differ in what they release: a sliding window needs only its last pages. One small class for
each kind of spec says which pages are needed (shared/kv/kv_retention.py); matching, sliding and cost follow from that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.shared.kv.kv_retention import Retention, StateRetention, WindowRetention, longest_match, retention_of
from quire.shared.kv.kv_specs import NOTHING, ONE_FULL, KVSpec, cross_length, without_cross

BlockArray = npt.NDArray[Any]  # integers, or floats for fractional blocks
ALL_BLOCKS = range(1 << 40)


@dataclass(frozen=True)
class KVGroups:
    """All KV groups of a worker, and the maximum chunk size. The group of encoder outputs is apart: its blocks do not
    grow with the sequence (cross_blocks.py), and no index or number of groups counts it."""

    all_specs: tuple[KVSpec, ...]
    block_size: int
    max_num_batched_tokens: int

    @cached_property
    def specs(self) -> tuple[KVSpec, ...]:
        """Specs of the groups whose blocks grow with the sequence."""
        return without_cross(self.all_specs)

    @cached_property
    def cross_length(self) -> int:
        """Most rows of an encoder's output that a sequence attends to; 0 without cross attention."""
        return cross_length(self.all_specs)

    def cross_cost(self, num_rows: int) -> int:
        """Returns the pages for `num_rows` rows of an encoder's output."""
        return -(-num_rows // self.block_size) if self.cross_length else 0

    @cached_property
    def num(self) -> int:
        return len(self.specs)

    @cached_property
    def plain(self) -> bool:
        """Whether there is a single full-attention group: the common case."""
        return self.specs == ONE_FULL or (self.num == 1 and not self.has_windows and not self.keep_nothing)

    @cached_property
    def keep_nothing(self) -> bool:
        """Whether sequences are computed in one step and have no blocks."""
        return self.specs == (NOTHING,)

    @cached_property
    def has_windows(self) -> bool:
        return bool(self.windows)

    @cached_property
    def has_states(self) -> bool:
        """Whether a group has a recurrent state: no token can be computed twice from it, and only later steps can read
        it."""
        return any(isinstance(kept, StateRetention) for kept in self.retentions)

    @cached_property
    def retentions(self) -> tuple[Retention, ...]:
        return tuple(retention_of(spec, self.block_size) for spec in self.specs)

    @cached_property
    def windows(self) -> dict[WindowRetention, tuple[int, ...]]:
        """Indices of the groups of each window; a recurrent state is a window over the previous token."""
        found: dict[WindowRetention, tuple[int, ...]] = {}
        for group, kept in enumerate(self.retentions):
            if isinstance(kept, WindowRetention):
                found[kept] = (*found.get(kept, ()), group)
        return found

    @cached_property
    def _chunk(self) -> int:
        """Number of block positions that the largest chunk touches."""
        return -(-self.max_num_batched_tokens // self.block_size) + 1

    def cost(self, num_blocks: int) -> int:
        """Returns the pages for `num_blocks` block positions, computed in chunks of maximum size."""
        return num_blocks if self.plain else sum(kept.cost(num_blocks, self._chunk) for kept in self.retentions)

    def least_cost(self, num_blocks: int) -> int:
        """Returns the minimum pages for `num_blocks` positions, with chunks as small as necessary."""
        return num_blocks if self.plain else sum(kept.cost(num_blocks, 1) for kept in self.retentions)

    def max_sequence_tokens(self, num_pages: int, max_model_len: int) -> int:
        """Returns the maximum number of tokens of a sequence that may use `num_pages` pages in chunks as small as
        necessary, at most `max_model_len`; whole blocks, found by bisection."""
        num_pages -= self.cross_cost(self.cross_length)
        most = -(-max_model_len // self.block_size)
        if self.least_cost(most) <= num_pages:
            return max_model_len
        low, high = 0, most
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.least_cost(middle) <= num_pages else (low, middle)
        return low * self.block_size

    def peak(self, num_blocks: BlockArray, num_sequences: BlockArray) -> BlockArray:
        """Returns the maximum pages for `num_blocks` positions of `num_sequences` sequences together; element-wise."""
        if self.plain:
            return num_blocks
        pages: BlockArray = np.zeros_like(num_blocks)
        for kept in self.retentions:
            most = num_sequences * kept.cost(1 << 40, self._chunk) if isinstance(kept, WindowRetention) else num_blocks
            pages = pages + np.minimum(num_blocks, most)
        return pages

    def match(self, found: Callable[[int, int], bool], num_blocks: int) -> int:
        """Returns the number of leading block positions that every group can continue from. `found(group, position)`:
        whether the page is cached."""
        return longest_match(self.retentions, found, num_blocks)

    def pages_read_from(self, ends: Iterable[int]) -> tuple[Container[int], ...]:
        """Returns the block positions of each group whose pages are read by sequences that start after `ends` leading
        blocks; all positions of a full-attention group."""
        ends = tuple(ends)
        return tuple(
            frozenset(block for end in ends for block in range(kept.first_needed(end), end))
            if isinstance(kept, WindowRetention)
            else ALL_BLOCKS
            for kept in self.retentions
        )
