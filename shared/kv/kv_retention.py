"""Retention of a KV group by its spec: which blocks of a sequence are needed, and which prefixes can be reused.

Schedulers plan by these rules, and readers of the prefix index apply the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.shared.kv.kv_specs import STATE_REACH, KVSpec, Nothing, State, Window

Found = Callable[[int], bool]  # block position -> whether its page is cached


class Retention(Protocol):
    """Rules of one KV group."""

    def match(self, found: Found, num_blocks: int) -> int:
        """Returns the largest number of leading blocks, at most `num_blocks`, after which a sequence can start."""

    def first_needed(self, num_blocks: int) -> int:
        """Returns the first block position read by a sequence that starts after `num_blocks` full blocks, whose last
        token may have to be recomputed."""

    def first_kept(self, num_computed: int) -> int:
        """Returns the first block position that a sequence with `num_computed` tokens still reads."""

    def cost(self, num_blocks: int, chunk: int) -> int:
        """Returns the maximum number of pages held at a time while computing `num_blocks` positions in steps of at
        most `chunk` positions."""


@dataclass(frozen=True, slots=True)
class FullRetention:
    """Full and latent attention: all blocks are kept."""

    def match(self, found: Found, num_blocks: int) -> int:
        return next((block for block in range(num_blocks) if not found(block)), num_blocks)

    def first_needed(self, num_blocks: int) -> int:
        return 0

    def first_kept(self, num_computed: int) -> int:
        return 0

    def cost(self, num_blocks: int, chunk: int) -> int:
        return num_blocks


@dataclass(frozen=True, slots=True)
class WindowRetention:
    """Sliding window: the next token, at position num_computed, attends to `length` positions, itself included."""

    length: int
    block_size: int

    def match(self, found: Found, num_blocks: int) -> int:
        """Returns the largest number of leading blocks whose last ones, which the window covers, are cached.
        Searches from the right, because earlier blocks need not be."""
        end = block = num_blocks
        while end and block > self.first_needed(end):
            block -= 1
            if not found(block):
                end = block
        return end

    def first_needed(self, num_blocks: int) -> int:
        return self.first_kept(num_blocks * self.block_size - 1)

    def first_kept(self, num_computed: int) -> int:
        return max(0, num_computed - self.length + 1) // self.block_size

    def cost(self, num_blocks: int, chunk: int) -> int:
        return min(num_blocks, -(-self.length // self.block_size) + chunk + 2)


@dataclass(frozen=True, slots=True)
class StateRetention(WindowRetention):
    """Recurrent state: the next token reads the page of the position before it. The page of a full block keeps the
    state after that block; a sequence that starts there reads it and writes to the next page."""


@dataclass(frozen=True, slots=True)
class NoRetention:
    """Encoders: a sequence is computed completely in one step and keeps nothing."""

    def match(self, found: Found, num_blocks: int) -> int:
        return 0

    def first_needed(self, num_blocks: int) -> int:
        return 0

    def first_kept(self, num_computed: int) -> int:
        return 0

    def cost(self, num_blocks: int, chunk: int) -> int:
        return 0


def retention_of(spec: KVSpec, block_size: int) -> Retention:
    """Returns the retention rules of a spec; a recurrent state is a window over the previous token."""
    if isinstance(spec, Nothing):
        return NoRetention()
    if isinstance(spec, State):
        return StateRetention(STATE_REACH, block_size)
    return WindowRetention(spec.length, block_size) if isinstance(spec, Window) else FullRetention()


def longest_match(retentions: Sequence[Retention], found: Callable[[int, int], bool], num_blocks: int) -> int:
    """Returns the largest number of leading blocks, at most `num_blocks`, after which a sequence can start in every
    group. `found(group, block)`: whether a page is cached."""
    most, before = num_blocks, -1
    while most != before:
        before = most
        for group, kept in enumerate(retentions):
            most = kept.match(functools.partial(found, group), most)
    return most
