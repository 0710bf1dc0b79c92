"""Advances running sequences: chunks of their prompts, blocks for their next tokens, and preemption when no blocks are
left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.services.scheduler.core.drafts.speculation import DraftController
from quire.services.scheduler.core.running.running import Slots
from quire.services.scheduler.core.scheduling.preemption import preempt_for_blocks
from quire.services.scheduler.core.sequences.media import item_around
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder


class RunningScheduler:
    """Running half of schedule(): advances the running sequences and preempts some when KV blocks run out."""

    def __init__(self, state: CoreState, speculation: DraftController, num_new_seqs: Callable[[], int]) -> None:
        """`num_new_seqs`: returns the number of sequences that wait for nothing but this step, as far as is known."""
        self._state = state
        self._tables, self._running, self._kv = state.tables, state.running, state.kv
        self._speculation = speculation
        self._num_entering = num_new_seqs

    def advance_ready(self, builder: PlanBuilder) -> None:
        """Schedules one token, and drafts if the worker drafts, for every sequence of this micro-batch that is past
        its prompt and below its limit. Skips sequences whose last token a step in flight computes; allocates blocks
        and may preempt sequences for them."""
        running = self._running
        ready = running.ready()
        if running.num_micro_batches > 1:
            ready &= running.micro_batches == builder.micro_batch
        done = running.confirmed(running.num_tokens) >= running.limit
        done &= ready
        if np.count_nonzero(done):
            for slot in done.nonzero()[0].tolist():
                builder.skip(slot)  # a step in flight computes its last token
            ready &= ~done
        slots = ready.nonzero()[0]
        if self.drafts_wanted:
            builder.num_drafts = self._speculation.length(len(slots), self._num_entering(), builder.budget.remaining)
        slots = self._grow(builder, slots)
        running.num_computed[slots] += 1
        running.num_tokens[slots] += 1
        if builder.num_drafts:
            running.assume_accepted(slots, builder.num_drafts)
        builder.advance(slots)

    def advance_prefills(self, builder: PlanBuilder) -> None:
        """Schedules the next chunk of every prompt of this micro-batch that is not computed yet, oldest first, until
        the token budget is used up; may preempt sequences for blocks."""
        running = self._running
        for slot in sorted(running.prefilling, key=lambda s: int(running.order[s])):
            if builder.budget.remaining == 0:
                return
            if slot % running.num_micro_batches != builder.micro_batch:
                continue
            if slot in running.prefilling:  # otherwise it was preempted for an older one
                self._advance_prefill(builder, slot)

    @property
    def drafts_wanted(self) -> bool:
        """Whether a running sequence is one that the worker drafts for."""
        if not self._speculation.enabled:
            return False
        return not self._state.limits.drafts_constrained_only or self._running.num_constrained > 0

    def _advance_prefill(self, builder: PlanBuilder, slot: int) -> None:
        """Schedules the next chunk of the prompt in `slot`, limited by the token budget and the free blocks;
        preempts a sequence instead if there is no room for a single token, or for the media item that comes next."""
        running, sequence = self._running, self._running.sequence(slot)
        computed = int(running.num_computed[slot])
        num_free_tokens = int(running.capacity[slot]) + self._kv.num_free * running.block_size - computed
        if num_free_tokens < least_chunk(self._state, sequence, computed):
            preempt_for_blocks(self._state, builder)
            return
        wanted = min(int(running.num_tokens[slot]) - computed, num_free_tokens)
        chunk = chunk_size(self._state, builder, sequence, computed, wanted)
        if not chunk:
            return  # the media item that comes next fits in a later step
        self._tables.grow(builder, slot, computed + chunk)
        self._tables.schedule_tokens(builder, slot, chunk)

    def _grow(self, builder: PlanBuilder, slots: Slots) -> Slots:
        """Allocates a block for each of `slots` that needs one for its next token, and more if drafts are in the
        step or in flight; preempts or skips sequences where blocks run out. Returns the slots that can advance."""
        running = self._running
        if self._speculation.enabled and (
            builder.num_drafts or any(flight.drafts is not None for flight in self._state.steps_in_flight)
        ):
            return self._grow_for_drafts(builder, slots)
        needy = slots[running.num_computed[slots] >= running.capacity[slots]]
        if len(needy) == 0:
            return slots
        if len(needy) <= self._kv.num_free:
            self._tables.append_each(builder, needy)
            return slots
        return self._grow_scarce(builder, slots, needy)

    def _grow_for_drafts(self, builder: PlanBuilder, slots: Slots) -> Slots:
        """Allocates blocks for the case that all drafts are accepted; if there are not enough, only for slots without
        room for a single token. The last token of a sequence is never computed."""
        running = self._running
        assumed = running.num_computed[slots] + 1 + builder.num_drafts
        lacking = np.minimum(assumed, running.limit[slots] - 1) - running.capacity[slots]
        missing = -(-lacking // running.block_size)
        needy = np.flatnonzero(missing > 0)
        if int(missing[needy].sum()) > self._kv.num_free:
            least = running.num_computed[slots] - running.num_drafts_in_flight[slots]
            return self._grow_scarce(builder, slots, slots[least >= running.capacity[slots]])
        for slot, count in zip(slots[needy].tolist(), missing[needy].tolist(), strict=True):
            self._tables.append_blocks(builder, slot, count)
        return slots

    def _grow_scarce(self, builder: PlanBuilder, slots: Slots, needy: Slots) -> Slots:
        """Allocates a block for each of the `needy` slots, oldest first, preempting a sequence where blocks run out
        and skipping slots that still have none. Returns those of `slots` that can advance."""
        running = self._running
        waits: set[int] = set()
        for slot in sorted(needy.tolist(), key=lambda s: int(running.order[s])):
            if not running.live[slot]:
                continue  # preempted for an older one
            if self._kv.num_free == 0:
                preempt_for_blocks(self._state, builder)
            if running.live[slot] and self._kv.num_free:
                self._tables.append_blocks(builder, slot)
            elif running.live[slot]:
                waits.add(slot)
                builder.skip(slot)
        return np.array([s for s in slots.tolist() if running.live[s] and s not in waits], dtype=np.intp)


def chunk_size(state: CoreState, builder: PlanBuilder, sequence: Sequence, begin: int, num_remaining: int) -> int:
    """Takes tokens of a prompt, from position `begin` on, from the step's budget: at most `num_remaining`, and at most
    long_prefill_token_threshold if other sequences are present. Returns the number of tokens of this step's chunk,
    possibly 0."""
    threshold = state.limits.long_prefill_token_threshold
    alone = len(state.sequences) == 1
    at_most = num_remaining if threshold == 0 or alone or state.limits.whole_prompts else threshold
    if state.limits.whole_media and sequence.media:
        return _chunk_of_whole_items(builder, sequence, begin, num_remaining, at_most)
    return builder.budget.try_add(num_remaining, at_most)


def least_chunk(state: CoreState, sequence: Sequence, begin: int) -> int:
    """Returns the least number of tokens from position `begin` on that a step may compute: those of a media item that
    is computed as a whole, else 1."""
    if not (state.limits.whole_media and sequence.media):
        return 1
    item = item_around(sequence.media, begin + 1)
    return 1 if item is None else item.end - begin


def _chunk_of_whole_items(
    builder: PlanBuilder, sequence: Sequence, begin: int, num_remaining: int, at_most: int
) -> int:
    """Takes the tokens of a chunk that ends outside of media items from the budget; returns their number. An item at
    its start is taken as a whole if the worker can compute that many tokens, beyond any shorter limit, else it is left
    out."""
    budget, items = builder.budget, sequence.media
    item = item_around(items, begin + min(num_remaining, at_most, budget.remaining))
    if item is None:
        return budget.try_add(num_remaining, at_most)
    if item.offset > begin:
        return budget.try_add(item.offset - begin, at_most)
    wanted = item.end - begin
    return wanted if wanted <= num_remaining and budget.try_take_whole(wanted) else 0
