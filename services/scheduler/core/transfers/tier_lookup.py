"""How far a prompt goes on below the device, and which pages somebody needs who starts there.

What lies below serves a start as the device does, where all groups have to agree (shared/kv/kv_retention.py): of a
group that keeps everything all pages are needed, of a window or a state the last ones alone, wherever each lies.
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

LEAST_BLOCKS = 2  # positions that are worth the wait
LEAST_STATES = 1  # a block that has room for a state is long

IsStored = Callable[[bytes], bool]  # whether a page of that name lies below the device, in a tier that is looked at


class NeededPages(NamedTuple):
    """Pages that a sequence needs which starts at some block position."""

    kept: list[int]  # blocks of the device that have it already
    names: list[bytes]  # of those that have to come, the head of the prompt first


class TierLookup(Protocol):
    """Pages below the device, as prompts find them. `found`: blocks as in a table, which the device has."""

    least: int  # block positions that are worth the wait

    def num_following(self, hashes: Blocks[bytes], found: Blocks[int], most: int, holds: IsStored) -> int:
        """How many block positions, at most `most`, could be had behind those that are found on the device."""

    def pages(self, hashes: Blocks[bytes], found: Blocks[int], num_following: int) -> NeededPages:
        """Returns the pages for a start behind so many more."""

    def register_prompt(self, sequence: Sequence, num_found: int, fork: int) -> tuple[list[bytes], list[bytes]]:
        """It comes in, behind so many block positions; other prompts have had the first `fork` of its blocks, too.
        Which pages of its prompt are worth a place below the device, and those of them that were not before: where it
        starts."""

    def pages_at_end(self, hashes: Blocks[bytes], num_blocks: int) -> Iterable[bytes]:
        """Pages that were not worth a place before somebody stopped behind the first `num_blocks` blocks."""


class SingleGroupLookup:
    """Pages of one group that keeps everything."""

    least = LEAST_BLOCKS

    def num_following(self, hashes: Blocks[bytes], found: Blocks[int], most: int, holds: IsStored) -> int:
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
    """Pages of any groups.

    What a window has slid over, or a state has left behind, serves those alone who start there. So its pages are worth
    a place where starts are likely: behind a prompt, behind an answer or what a preempted sequence has of it, where
    somebody has started, and where a prompt leaves what others have had, too (as Marconi admits states, Pan et al.,
    MLSys 2025).
    """

    def __init__(self, pool: BlockPool, groups: KVGroups) -> None:
        self._pool, self._groups = pool, groups
        self.least = LEAST_STATES if groups.has_states else LEAST_BLOCKS

    def num_following(self, hashes: Blocks[bytes], found: Blocks[int], most: int, holds: IsStored) -> int:
        start, find = len(found) // self._groups.num, self._pool.find

        def there(group: int, block: int) -> bool:
            name = page_name(hashes[block], group)
            return find(name) is not None or holds(name)

        return max(0, self._groups.match(there, min(len(hashes), start + most)) - start)

    def pages(self, hashes: Blocks[bytes], found: Blocks[int], num_following: int) -> NeededPages:
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
        hashes, size = sequence.block_hashes, self._groups.block_size
        ends = {min(num_found, len(hashes)), fork, len(hashes)}
        if self._groups.has_states:  # the prompt may come again: its last token is computed anew
            ends.add((sequence.num_tokens - 1) // size)
        sequence.restart_points = tuple(sorted(ends))
        worth = self._groups.pages_behind(ends)
        names = [
            page_name(block_hash, group)
            for block, block_hash in enumerate(hashes)
            for group, kept in enumerate(worth)
            if block in kept
        ]
        return names, [*self.pages_at_end(hashes, min(num_found, len(hashes)))]

    def pages_at_end(self, hashes: Blocks[bytes], num_blocks: int) -> Iterable[bytes]:
        windows, retentions = self._groups.windows, self._groups.retentions
        firsts = [kept.first_needed(num_blocks) if kept in windows else num_blocks for kept in retentions]
        return self._names(hashes, num_blocks, firsts)

    def _firsts(self, end: int) -> list[int]:
        """The first block position that is needed of each group."""
        return [kept.first_needed(end) for kept in self._groups.retentions]

    def _names(self, hashes: Blocks[bytes], end: int, firsts: list[int]) -> list[bytes]:
        return [
            page_name(hashes[block], group)
            for block in range(min(firsts, default=0), end)
            for group, first in enumerate(firsts)
            if block >= first
        ]


def tier_lookup_of(kv: KVCacheManager) -> TierLookup:
    return SingleGroupLookup() if kv.groups.plain else MultiGroupLookup(kv.pool, kv.groups)
