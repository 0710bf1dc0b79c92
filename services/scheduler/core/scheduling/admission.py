"""Admission of waiting sequences to a step."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Protocol

from quire.services.scheduler.core.prerequisites.encoder_outputs import EncoderOutputs
from quire.services.scheduler.core.prerequisites.port import BlockSource
from quire.services.scheduler.core.scheduling.sequence_starter import CachedPrefix, SequenceStarter
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder
from quire.services.scheduler.core.timing.step_times import PromptPace

DEADLINE_UNREACHABLE = Failure(
    "DEADLINE_EXCEEDED", "the first token could not have been computed before the deadline; nothing was computed"
)


class AdmitSearch(Protocol):
    """Admits the beam search at the head of the queue if all its beams fit; returns True if the queue advanced."""

    def __call__(self, builder: PlanBuilder, root: Sequence, now: float) -> bool: ...


class Admitter:
    """Waiting half of schedule(). No sequence overtakes another: admission stops at the first one that does not fit.
    Only tenants that may not take the last slots are passed over."""

    def __init__(
        self,
        state: CoreState,
        starter: SequenceStarter,
        pace: PromptPace,
        admit_search: AdmitSearch,
        *,
        sources: Seq[BlockSource],
        encoder_outputs: EncoderOutputs,
    ) -> None:
        """`sources`: sources of blocks that the device lacks, in the order in which they are asked;
        `encoder_outputs`: rows of which cross attention's keys and values are computed."""
        self._state, self._encoder_outputs = state, encoder_outputs
        self._sources = sources
        self._observers = [source for source in sources if type(source).admitted is not BlockSource.admitted]
        self._starter = starter
        self._pace = pace
        self._admit_search = admit_search
        self._num_deferred = 0  # waiting sequences that the last step had no room for

    @property
    def num_new_seqs(self) -> int:
        """Number of sequences that wait for nothing but the next step, as far as is known."""
        return min(max(0, len(self._state.waiting) - self._num_deferred), self._state.running.num_free_slots)

    def admit(self, builder: PlanBuilder, now: float) -> None:
        """Admits waiting sequences, in the order of the policy, to the step being built; none while running ones
        lack blocks. Unpins the source blocks of copies afterwards."""
        if self._state.waiting and not builder.short_of_blocks:
            self._admit_all(builder, now)
            self._state.waiting.end_admission()
            self._state.kv.unpin()  # from here on no block is allocated before the copies of this step
        self._num_deferred = len(self._state.waiting) if builder.budget.remaining else 0

    def _admit_all(self, builder: PlanBuilder, now: float) -> None:
        """Admits the head of the queue again and again until it does not fit, or slots or tokens of the step run
        out. Sequences that would miss their deadline finish with an error; those whose prefix is worth fetching are
        blocked; beam searches go to `admit_search`."""
        state = self._state
        while builder.budget.remaining and self._has_slot(builder.micro_batch):
            sequence = state.waiting.next_for(state.running)
            if sequence is None or sequence.fence > state.last_applied:
                return  # none may take a slot, or a step in flight still returns a token of it
            if state.kv.cross is not None and not self._encoder_outputs.join(sequence):
                state.queue.block(sequence)  # the keys and values of its item were evicted while it waited
                continue
            if sequence.search is not None:
                if not self._admit_search(builder, sequence, now):
                    return
                continue
            if state.limits.whole_prompts and sequence.num_tokens > builder.budget.remaining:
                return  # it fits in the next step
            start = self._starter.find_cached_prefix(sequence)
            if sequence.media and not self._encoder_outputs.is_ready(sequence, start.num_cached):
                state.queue.block(sequence)  # blocks with the tokens of an item were evicted while it waited
                continue
            if not self._starter.fits_step(builder, sequence, start):
                self._starter.keep_match(sequence, start)
                return  # its first media item fits in a later step
            if self._misses_deadline(sequence, start, now):
                state.finish(sequence, Reason.DEADLINE, failure=DEADLINE_UNREACHABLE)
                continue
            if self._waits_for_blocks(sequence, start):
                continue
            if not self._fits(sequence, start) or (sequence.is_suspect and state.suspects):
                self._starter.keep_match(sequence, start)
                return
            self._start(builder, sequence, start, now)

    def _start(self, builder: PlanBuilder, sequence: Sequence, start: CachedPrefix, now: float) -> None:
        """Takes the head of the queue out of it and starts it."""
        state = self._state
        state.queue.pop()
        if not sequence.was_admitted:
            for source in self._observers:
                source.admitted(sequence, len(start.full_blocks) // state.kv.num_groups)
        self._starter.record_admission(sequence, start.num_cached, now)
        self._starter.start_sequence(builder, sequence, start)
        if sequence.is_query and builder.is_ending(sequence.slot):
            state.on_prompts_scheduled([sequence])  # its documents are admitted in the same step

    def _has_slot(self, micro_batch: int) -> bool:
        """Returns whether a slot of this micro-batch is free, besides those reserved for beams. No micro-batch takes
        more than its share of the sequences, so that every pipeline stage has work."""
        state, running = self._state, self._state.running
        num_reserved = state.searches.num_reserved if state.searches.by_root else 0
        if running.num_free_slots <= num_reserved:
            return False
        most = running.num_micro_batches
        if most == 1:
            return True
        share, rest = divmod(len(running) + len(state.waiting), most)
        return running.free_slots.count(micro_batch) > 0 and running.num_live_of(micro_batch) < share + (
            micro_batch < rest
        )

    def _waits_for_blocks(self, sequence: Sequence, start: CachedPrefix) -> bool:
        """Blocks the head of the queue if more of its prefix is stored outside the device, fetching that is worth the
        wait, and there is room for it. Returns whether it is blocked."""
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
        """Returns whether all known tokens fit now, so that no prompt is preempted half computed, and whether the
        expected growth of all sequences fits until they end."""
        state, limits = self._state, self._state.limits
        if limits.whole_prompts:
            return True  # the step has room, and the sequence needs no blocks
        alone = len(state.running) == 0
        if alone or not self._starter.fits_now(sequence, start, limits.watermark_blocks):
            return alone and self._starter.fits_alone(sequence, start)
        usable = limits.usable_blocks - limits.watermark_blocks + state.kv.pool.num_shared - state.kv.num_held
        most = state.running.max_blocks + state.running.max_blocks_of(sequence)
        if most <= usable:
            return True  # fits even in the worst case: the common case, decided without a forecast
        num_unowned = (0 if start.match is None else start.match.num_free) + (start.reused_block is not None)
        usable += start.num_shared - num_unowned
        if most <= usable:
            return True
        if state.kv.cross is not None:
            usable -= state.kv.cross.num_references + self._starter.num_missing_cross(sequence)
        counted = state.waiting.counted(state.running, sequence)
        return state.forecast.fits(state.running, counted, sequence, usable, state.kv.groups)

    def _misses_deadline(self, sequence: Sequence, start: CachedPrefix, now: float) -> bool:
        """Returns whether the sequence's deadline passes before its uncached tokens can be computed, at the measured
        pace; False without a deadline."""
        if sequence.deadline == math.inf:
            return False
        uncached = sequence.num_tokens - start.num_cached
        return now + self._pace.seconds_for(uncached) >= sequence.deadline
