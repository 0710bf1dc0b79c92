"""What a KV group keeps of a sequence, by its spec: which blocks are needed, and which prefixes it can serve.

Schedulers plan by it, and whoever looks a prompt up in the prefix index reckons the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.shared.kv.kv_specs import STATE_REACH, KVSpec, Nothing, State, Window

Found = Callable[[int], bool]  # whether the page of a block position is cached


class Retention(Protocol):
    """What a group keeps of a sequence."""

    def match(self, found: Found, num_blocks: int) -> int:
        """The most of `num_blocks` leading block positions that a sequence can start behind."""

    def first_needed(self, num_blocks: int) -> int:
        """The first block position that somebody reads who starts behind so many whole blocks, of which the last token
        may have to be computed again."""

    def first_kept(self, num_computed: int) -> int:
        """The first block position that somebody who has computed so many tokens still reads."""

    def cost(self, num_blocks: int, chunk: int) -> int:
        """Most pages held at a time on the way to `num_blocks` positions, in steps of at most `chunk` positions."""


@dataclass(frozen=True, slots=True)
class FullRetention:
    """Full and latent attention."""

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
    """The next token, at position num_computed, sees `length` positions, its own included."""

    length: int
    block_size: int

    def match(self, found: Found, num_blocks: int) -> int:
        """A run of cached pages that ends at the start is enough: looked for from the right."""
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
    """A page for each block position, of which the next token needs that of the one before: what is in it when its
    block is full stays, and whoever starts behind that block reads it and writes into the next page."""


@dataclass(frozen=True, slots=True)
class NoRetention:
    """Encoders: what is not computed in one step cannot be computed."""

    def match(self, found: Found, num_blocks: int) -> int:
        return 0

    def first_needed(self, num_blocks: int) -> int:
        return 0

    def first_kept(self, num_computed: int) -> int:
        return 0

    def cost(self, num_blocks: int, chunk: int) -> int:
        return 0


def retention_of(spec: KVSpec, block_size: int) -> Retention:
    if isinstance(spec, Nothing):
        return NoRetention()
    if isinstance(spec, State):
        return StateRetention(STATE_REACH, block_size)
    return WindowRetention(spec.length, block_size) if isinstance(spec, Window) else FullRetention()


def longest_match(retentions: Sequence[Retention], found: Callable[[int, int], bool], num_blocks: int) -> int:
    """The most of `num_blocks` leading block positions that a sequence can start behind in every group. `found`: of
    group and block position."""
    most, before = num_blocks, -1
    while most != before:
        before = most
        for group, kept in enumerate(retentions):
            most = kept.match(functools.partial(found, group), most)
    return most
