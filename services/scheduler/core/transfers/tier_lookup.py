"""Lookup of prompt pages in the tiers below the device: how far a cached prefix continues there, and which pages a
start needs.

A lower tier serves a start like the device does, and all KV groups have to agree (shared/kv/kv_retention.py): of a
full-attention group all pages are needed, of a sliding window or a recurrent state only the last ones, wherever each is
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Blocks
from typing import NamedTuple, Protocol

from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.kv_cache.block_pool import BlockPool
from quire.services.scheduler.kv_cache.groups import KVGroups
from quire.services.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from quire.shared.kv.block_hash import page_name

MIN_BLOCKS = 2  # minimum block positions that are worth the wait
MIN_STATES = 1  # minimum for recurrent states: their blocks are long

IsStored = Callable[[bytes], bool]  # whether a page of that name is stored in a tier that is looked up


class NeededPages(NamedTuple):
    """Pages that a sequence needs to start at some block position."""

    kept: list[int]  # device blocks that hold needed pages already
    names: list[bytes]  # names of the pages to fetch, head of the prompt first


class TierLookup(Protocol):
    """Lookup of pages below the device. `found`: device blocks, in the layout of a block table."""

    least: int  # minimum block positions that are worth the wait

    def num_following(self, hashes: Blocks[bytes], found: Blocks[int], most: int, holds: IsStored) -> int:
        """Returns the number of block positions, at most `most`, that can follow those found on the device."""

    def pages(self, hashes: Blocks[bytes], found: Blocks[int], num_following: int) -> NeededPages:
        """Returns the pages for a start after `num_following` more positions."""

    def register_prompt(self, sequence: Sequence, num_found: int, fork: int) -> tuple[list[bytes], list[bytes]]:
        """Registers the first admission of a prompt with `num_found` cached block positions; other prompts share its
        first `fork` blocks. Returns the names of its pages that are worth storing, and those of them at the point where
        it starts, which were not worth storing before."""

    def pages_at_end(self, hashes: Blocks[bytes], num_blocks: int) -> Iterable[bytes]:
        """Returns the pages that become worth storing when a sequence ends after the first `num_blocks` blocks."""


class SingleGroupLookup:
    """Lookup for a single full-attention group, of which every block of a prompt is needed and worth storing."""

    least = MIN_BLOCKS

    def num_following(self, hashes: Blocks[bytes], found: Blocks[int], most: int, holds: IsStored) -> int:
        """Returns the number of consecutive blocks of the hash chain after those found, at most `most`, that `holds`
        says are stored."""
        start = end = len(found)
        last = min(len(hashes), start + most)
        while end < last and holds(hashes[end]):
            end += 1
        return end - start

    def pages(self, hashes: Blocks[bytes], found: Blocks[int], num_following: int) -> NeededPages:
        start = len(found)
        return NeededPages(list(found), list(hashes[start : start + num_following]))

    def register_prompt(self, sequence: Sequence, num_found: int, fork: int) -> tuple[list[bytes], list[bytes]]:
        return sequence.block_hashes, []

    def pages_at_end(self, hashes: Blocks[bytes], num_blocks: int) -> Iterable[bytes]:
        return ()


class MultiGroupLookup:
    """Lookup for any KV groups.

    Pages that a window has slid over, or that a recurrent state has passed, are only useful to sequences that start
    there. So they are worth storing only where starts are likely: at the end of a prompt, at the end of an answer or of
    a preempted sequence, where a sequence has started, and where a prompt diverges from others (as Marconi admits
    states, Pan et al., MLSys 2025).
    """

    def __init__(self, pool: BlockPool, groups: KVGroups) -> None:
        self._pool, self._groups = pool, groups
        self.least = MIN_STATES if groups.has_states else MIN_BLOCKS

    def num_following(self, hashes: Blocks[bytes], found: Blocks[int], most: int, holds: IsStored) -> int:
        """Returns the number of block positions, at most `most`, after those found on the device at which all KV
        groups agree that a start is possible; a page counts if it is on the device or `holds` says that it is
        stored."""
        start, find = len(found) // self._groups.num, self._pool.find

        def is_stored(group: int, block: int) -> bool:
            name = page_name(hashes[block], group)
            return find(name) is not None or holds(name)

        return max(0, self._groups.match(is_stored, min(len(hashes), start + most)) - start)

    def pages(self, hashes: Blocks[bytes], found: Blocks[int], num_following: int) -> NeededPages:
        """Returns the pages of all groups for a start after `num_following` more positions: the device blocks that
        hold some of them, and the names of the others."""
        end = len(found) // self._groups.num + num_following
        kept, names = [], []
        for name in self._names(hashes, end, self._firsts(end)):
            block = self._pool.find(name)
            if block is None:
                names.append(name)
            else:
                kept.append(block)
        return NeededPages(kept, names)

    def register_prompt(self, sequence: Sequence, num_found: int, fork: int) -> tuple[list[bytes], list[bytes]]:
        """Stores the likely restart points of the prompt in `sequence.restart_points` (its cached end, the fork, its
        end). Returns the names of the pages needed to start at any of them, and the names of those at the cached
        end."""
        hashes, size = sequence.block_hashes, self._groups.block_size
        ends = {min(num_found, len(hashes)), fork, len(hashes)}
        if self._groups.has_states:  # the same prompt may come again: its last token is computed anew
            ends.add((sequence.num_tokens - 1) // size)
        sequence.restart_points = tuple(sorted(ends))
        worth = self._groups.pages_read_from(ends)
        names = [
            page_name(block_hash, group)
            for block, block_hash in enumerate(hashes)
            for group, kept in enumerate(worth)
            if block in kept
        ]
        return names, [*self.pages_at_end(hashes, min(num_found, len(hashes)))]

    def pages_at_end(self, hashes: Blocks[bytes], num_blocks: int) -> Iterable[bytes]:
        """Returns the pages that a start after `num_blocks` blocks needs of groups with windows or states, and none
        of full-attention groups, whose pages are stored as they fill."""
        windows, retentions = self._groups.windows, self._groups.retentions
        firsts = [kept.first_needed(num_blocks) if kept in windows else num_blocks for kept in retentions]
        return self._names(hashes, num_blocks, firsts)

    def _firsts(self, end: int) -> list[int]:
        """Returns the first needed block position of each group."""
        return [kept.first_needed(end) for kept in self._groups.retentions]

    def _names(self, hashes: Blocks[bytes], end: int, firsts: list[int]) -> list[bytes]:
        """Returns the page names of block positions [firsts[g], end) of each group g, head of the prompt first."""
        return [
            page_name(hashes[block], group)
            for block in range(min(firsts, default=0), end)
            for group, first in enumerate(firsts)
            if block >= first
        ]


def tier_lookup_of(kv: KVCacheManager) -> TierLookup:
    """Returns the lookup that suits the KV groups of a worker; the one for a single full-attention group is cheaper."""
    return SingleGroupLookup() if kv.groups.plain else MultiGroupLookup(kv.pool, kv.groups)
