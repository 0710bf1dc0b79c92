"""Letting waiting sequences in."""

from __future__ import annotations

import math
from collections.abc import Sequence as Blocks
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.plan import Admission, Started
from services.scheduler.core.scheduling.plan_builder import PlanBuilder
from services.scheduler.core.sequence import TOKEN_BYTES, Failure, Reason, Sequence, Status
from services.scheduler.kv_cache.match import Match
from services.scheduler.kv_cache.part_index import Part

if TYPE_CHECKING:
    from services.scheduler.core.core import Core

TOO_LATE = Failure("DEADLINE_EXCEEDED", "its first token could not have come before the deadline; nothing was computed")


@dataclass(frozen=True, slots=True)
class Start:
    """What a sequence finds computed: full blocks, then perhaps the beginning of another."""

    whole: Blocks[int]
    num_cached: int  # tokens
    taken: int | None = None  # the block that holds the rest of them, which an ended sequence left: it goes on in that
    copied: int | None = None  # the block that holds the rest of them, and of which it needs a copy
    match: Match | None = None  # that the whole ones are from; None: those of a sibling, which runs

    @property
    def shared(self) -> list[int]:
        """All that it does not have to take."""
        return list(self.whole) if self.taken is None else [*self.whole, self.taken]

    @property
    def num_shared(self) -> int:
        return len(self.whole) + (self.taken is not None)


class Admitter:
    """The waiting half of schedule(). Nobody overtakes: it stops at the first sequence that cannot come in."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._num_held_back = 0  # for whom the last step had no room
        self._looked_up: tuple[int, Match] | None = None  # of the head that did not fit, by its key

    @property
    def num_entering(self) -> int:
        """Sequences that wait for the next step and nothing else, as far as is known."""
        return min(max(0, len(self._core.waiting) - self._num_held_back), self._core.running.num_free_slots)

    def admit(self, builder: PlanBuilder, now: float) -> None:
        """Nobody, while those who are in are short of blocks."""
        if self._core.waiting and not builder.short_of_blocks:
            self._admit_all(builder, now)
            self._core.kv.unpin()  # from here on no block is taken before the copies of this step are made
        self._num_held_back = len(self._core.waiting) if builder.budget.left else 0

    def _admit_all(self, builder: PlanBuilder, now: float) -> None:
        core = self._core
        while core.waiting and builder.budget.left and core.running.num_free_slots > core.beams.num_reserved:
            sequence = core.waiting.peek()
            if sequence.fence > core.last_applied:
                return  # a token of it is still to come back
            if sequence.search is not None:
                if not core.beams.admit(builder, sequence, now):
                    return
                continue
            start = self.start(sequence)
            if self._too_late(sequence, start, now):
                core.end(sequence, Reason.DEADLINE, failure=TOO_LATE)
                continue
            if not self._fits(sequence, start) or (sequence.suspect and core.suspects):
                self._looked_up = None if start.match is None else (sequence.key, start.match)
                return
            core.next_waiting()
            self._enter(builder, sequence, start, now)

    def start(self, sequence: Sequence) -> Start:
        """From a sibling that has computed the prompt, else from the prefix cache. Changes nothing."""
        core, size = self._core, self._core.limits.block_size
        donor = core.siblings.donor(sequence)
        if donor is not None:
            table, num_whole = core.kv.table(donor), sequence.num_tokens // size
            last = table[num_whole] if sequence.num_tokens % size else None
            return Start(table[:num_whole], sequence.num_tokens, copied=last)
        match = self._match(sequence)
        whole = match.blocks
        start = Start(whole, len(whole) * size, match=match)
        part = self._match_part(sequence, len(whole))
        if part is None:
            return start
        assert part.num_tokens < size, "whole blocks have been found"
        num_cached = start.num_cached + part.num_tokens
        is_free = core.kv.pool.references(part.block) == 0
        if part.is_all and is_free:
            return Start(whole, num_cached, taken=part.block, match=match)  # nobody misses it: no copy
        beside = Start(whole, num_cached, copied=part.block, match=match)
        return beside if not is_free or self._fits_now(sequence, beside, core.limits.watermark_blocks) else start

    def _match_part(self, sequence: Sequence, num_whole: int) -> Part | None:
        """A block of the prefix cache that begins as the one behind the whole ones does. None for beams, which come in
        all or none and count on every block that is free now."""
        core, size = self._core, self._core.limits.block_size
        if core.kv.parts is None or sequence.skip_reading_prefix_cache or sequence.is_beam:
            return None
        begin = num_whole * size
        end = min(begin + size, sequence.num_tokens)
        if sequence.asks_prompt_logprobs:
            end = min(end, sequence.prompt_logprobs_from - 1)
        if end - begin < core.limits.prefix_grain:
            return None
        tokens = sequence.tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES]
        return core.kv.match_part(sequence.hash_before(num_whole) + tokens)

    def _match(self, sequence: Sequence) -> Match:
        """Blocks of the prefix cache that it may start with: none that the log-probabilities of its prompt need."""
        if self._looked_up is not None and self._looked_up[0] == sequence.key:
            match = self._looked_up[1]
            match.update()
        else:
            match = self._core.kv.match(() if sequence.skip_reading_prefix_cache else sequence.block_hashes)
        if sequence.asks_prompt_logprobs:
            match.shorten((sequence.prompt_logprobs_from - 1) // self._core.limits.block_size)
        return match

    def _fits_now(self, sequence: Sequence, start: Start, num_left: int) -> bool:
        """Whether all known tokens have room beside what it finds, with so many blocks left over."""
        kv = self._core.kv
        missing = kv.blocks_for(sequence.num_tokens) - start.num_shared + num_left
        if missing > kv.pool.num_free:
            return False
        return missing <= kv.pool.num_free - self._num_unowned(start)

    def _num_unowned(self, start: Start) -> int:
        """Blocks that it finds and nobody refers to: once it shares them nobody else can take them."""
        beside = start.taken if start.taken is not None else start.copied
        num_unowned = 0 if start.match is None else start.match.num_free
        return num_unowned + (beside is not None and self._core.kv.pool.references(beside) == 0)

    def _fits(self, sequence: Sequence, start: Start) -> bool:
        """All known tokens must fit now, so that a prompt is not half computed and then preempted; and what everybody
        is expected to grow to must fit until they end."""
        core, limits = self._core, self._core.limits
        alone = len(core.running) == 0
        if alone or not self._fits_now(sequence, start, limits.watermark_blocks):
            return alone and self._fits_now(sequence, start, 0)
        num_unowned = (0 if start.match is None else start.match.num_free) + (start.taken is not None)
        shared = core.kv.pool.num_shared + start.num_shared - num_unowned
        usable = limits.usable_blocks - limits.watermark_blocks + shared
        if core.running.most_blocks + sequence.max_total_tokens // limits.block_size + 1 <= usable:
            return True  # whatever comes: the usual case, and all it costs
        counted = core.waiting.counted(core.running, sequence)
        return core.forecast.fits(core.running, counted, sequence, usable, limits.block_size)

    def _too_late(self, sequence: Sequence, start: Start, now: float) -> bool:
        """Its deadline will have passed before it can have a single token."""
        if sequence.deadline == math.inf:
            return False
        uncached = sequence.num_tokens - start.num_cached
        return now + self._core.pace.seconds_for(uncached) >= sequence.deadline

    def _enter(self, builder: PlanBuilder, sequence: Sequence, start: Start, now: float) -> None:
        self.count(sequence, start.num_cached, now)
        self._occupy(builder, sequence, start)

    def occupy(self, builder: PlanBuilder, beam: Sequence) -> None:
        """A slot for a beam of a search that fits."""
        start = self.start(beam)
        beam.num_cached_tokens = start.num_cached
        self._occupy(builder, beam, start)

    def _occupy(self, builder: PlanBuilder, sequence: Sequence, start: Start) -> None:
        core, shared, num_cached = self._core, start.shared, start.num_cached
        num_whole = num_cached // core.limits.block_size
        num_computed = min(num_cached, sequence.num_tokens - 1)  # the last token's logits are always needed
        num_tokens, token_ids = sequence.num_tokens, bytes(sequence.tokens)
        slot = core.running.enter(sequence, num_computed)
        if sequence.suspect:
            core.suspects.add(slot)
        core.kv.admit(slot, shared, num_whole)
        core.running.num_named[slot] = num_whole
        if start.copied is not None:
            core.kv.pin(start.copied)
        chunk = core.grower.chunk_size(builder, num_tokens - num_computed)
        blocks = core.kv.grow(slot, num_computed + chunk)
        assert blocks is not None, "_fits saw to it"
        core.running.capacity[slot] = (len(shared) + len(blocks)) * core.limits.block_size
        builder.gain(slot, shared + blocks)
        if start.copied is not None:
            builder.copy(start.copied, blocks[0])
        builder.admit(Admission(slot, sequence, token_ids, num_cached))
        core.grower.compute(builder, slot, chunk)
        if core.limits.enable_prefix_caching:  # the next one to come in may start with the same blocks
            core.grower.name(slot, min(num_tokens, num_computed + chunk) // core.limits.block_size)

    def count(self, sequence: Sequence, num_cached: int, now: float) -> None:
        """It has a slot."""
        counts = self._core.counts
        sequence.status = Status.RUNNING
        if sequence.started:
            counts.resumed_tokens += sequence.num_tokens
            counts.resumed_cached_tokens += num_cached
        else:
            counts.prompt_tokens += sequence.num_tokens
            counts.cached_tokens += num_cached
            self._core.waiting.charge_prompt(sequence, max(0, sequence.num_tokens - num_cached))
            sequence.started = True
            for output in sequence.outputs or (sequence,):
                output.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
                self._core.events.started.append(Started(output, now - sequence.arrival))
