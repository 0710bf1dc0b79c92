"""Letting waiting sequences in."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Protocol

from quire.services.scheduler.core.prerequisites.port import BlockSource
from quire.services.scheduler.core.scheduling.sequence_starter import CachedPrefix, SequenceStarter
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder
from quire.services.scheduler.core.timing.pace import PromptPace

DEADLINE_UNREACHABLE = Failure(
    "DEADLINE_EXCEEDED", "its first token could not have come before the deadline; nothing was computed"
)


class AdmitSearch(Protocol):
    """Lets the search at the head of the queue in, if there is room for all of it; whether the queue moved on."""

    def __call__(self, builder: PlanBuilder, root: Sequence, now: float) -> bool: ...


class Admitter:
    """The waiting half of schedule(). Nobody overtakes: it stops at the first sequence that cannot come in."""

    def __init__(
        self,
        state: CoreState,
        entry: SequenceStarter,
        pace: PromptPace,
        admit_search: AdmitSearch,
        sources: Seq[BlockSource],
    ) -> None:
        """`sources`: where blocks come from that the device lacks, the first to be asked first."""
        self._state = state
        self._sources = sources
        self._observers = [source for source in sources if type(source).admitted is not BlockSource.admitted]
        self._starter = entry
        self._pace = pace
        self._admit_search = admit_search
        self._num_deferred = 0  # for whom the last step had no room

    @property
    def num_new_seqs(self) -> int:
        """Sequences that wait for the next step and nothing else, as far as is known."""
        return min(max(0, len(self._state.waiting) - self._num_deferred), self._state.running.num_free_slots)

    def admit(self, builder: PlanBuilder, now: float) -> None:
        """Nobody, while those who are in are short of blocks."""
        if self._state.waiting and not builder.short_of_blocks:
            self._admit_all(builder, now)
            self._state.kv.unpin()  # from here on no block is taken before the copies of this step are made
        self._num_deferred = len(self._state.waiting) if builder.budget.remaining else 0

    def _admit_all(self, builder: PlanBuilder, now: float) -> None:
        state = self._state
        while state.waiting and builder.budget.remaining and self._has_slot(builder.micro_batch):
            sequence = state.waiting.peek()
            if sequence.fence > state.last_applied:
                return  # a token of it is still to come back
            if sequence.search is not None:
                if not self._admit_search(builder, sequence, now):
                    return
                continue
            if state.limits.whole_prompts and sequence.num_tokens > builder.budget.remaining:
                return  # it begins the next step
            start = self._starter.find_cached_prefix(sequence)
            if self._misses_deadline(sequence, start, now):
                state.finish(sequence, Reason.DEADLINE, failure=DEADLINE_UNREACHABLE)
                continue
            if self._waits_for_blocks(sequence, start):
                continue
            if not self._fits(sequence, start) or (sequence.is_suspect and state.suspects):
                self._starter.keep_match(sequence, start)
                return
            state.queue.pop()
            if not sequence.was_admitted:
                for source in self._observers:
                    source.admitted(sequence, len(start.full_blocks) // state.kv.num_groups)
            self._starter.record_admission(sequence, start.num_cached, now)
            self._starter.start_sequence(builder, sequence, start)
            if sequence.is_query and builder.is_ending(sequence.slot):
                state.on_prompts_scheduled([sequence])  # its documents find it in the same step

    def _has_slot(self, micro_batch: int) -> bool:
        """Whether somebody may come in with this micro-batch: none takes more than its share, so that every stage has
        something to do."""
        state, running = self._state, self._state.running
        if running.num_free_slots <= state.searches.num_reserved:
            return False
        most = running.num_micro_batches
        if most == 1:
            return True
        share, rest = divmod(len(running) + len(state.waiting), most)
        return running.free_slots.count(micro_batch) > 0 and running.num_live_of(micro_batch) < share + (
            micro_batch < rest
        )

    def _waits_for_blocks(self, sequence: Sequence, start: CachedPrefix) -> bool:
        """Blocks the head of the queue if more of it lies outside the device and is worth the wait, and there is room
        for that. Returns whether it waits."""
        state = self._state
        for source in self._sources:
            if source.is_available:
                break
        else:
            return False
        if start.match is None or sequence.skip_reading_prefix_cache:
            return False
        if not self._starter.fits_now(sequence, start, state.limits.watermark_blocks):
            return False
        num_found = len(start.full_blocks) // state.kv.num_groups
        most = self._starter.max_readable_blocks(sequence) - num_found
        if not any(source.fetch(sequence, start.full_blocks, most) for source in self._sources if source.is_available):
            return False
        state.queue.block(sequence)
        return True

    def _fits(self, sequence: Sequence, start: CachedPrefix) -> bool:
        """All known tokens must fit now, so that a prompt is not half computed and then preempted; and what everybody
        is expected to grow to must fit until they end."""
        state, limits = self._state, self._state.limits
        if limits.whole_prompts:
            return True  # there is room in the step, and it takes no blocks
        alone = len(state.running) == 0
        if alone or not self._starter.fits_now(sequence, start, limits.watermark_blocks):
            return alone and self._starter.fits_alone(sequence, start)
        usable = limits.usable_blocks - limits.watermark_blocks + state.kv.pool.num_shared - state.kv.num_held
        most = state.running.max_blocks + state.running.max_blocks_of(sequence)
        if most <= usable:
            return True  # whatever comes: the usual case, and all it costs
        num_unowned = (0 if start.match is None else start.match.num_free) + (start.reused_block is not None)
        usable += start.num_shared - num_unowned
        if most <= usable:
            return True
        counted = state.waiting.counted(state.running, sequence)
        return state.forecast.fits(state.running, counted, sequence, usable, state.kv.groups)

    def _misses_deadline(self, sequence: Sequence, start: CachedPrefix, now: float) -> bool:
        """Its deadline will have passed before it can have a single token."""
        if sequence.deadline == math.inf:
            return False
        uncached = sequence.num_tokens - start.num_cached
        return now + self._pace.seconds_for(uncached) >= sequence.deadline
