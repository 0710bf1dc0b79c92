"""Moving running sequences forward: blocks for their next tokens, and whom to preempt when there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.running import Slots
from services.scheduler.core.scheduling.plan_builder import PlanBuilder
from services.scheduler.core.sequence import TOKEN_BYTES
from services.scheduler.kv_cache.part_index import PARENT_BYTES

if TYPE_CHECKING:
    from services.scheduler.core.core import Core


class Grower:
    """The running half of schedule()."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._running = core.running
        self._kv = core.kv
        self._num_ordered = np.zeros(self._running.num_slots, dtype=np.int32)  # positions that ordered steps compute

    def advance_ready(self, builder: PlanBuilder) -> None:
        """One token for every sequence that is past its prompt and below its limit."""
        running = self._running
        slots = running.ready().nonzero()[0]
        going_on = running.num_tokens[slots] - running.num_drafts_in_flight[slots] < running.limit[slots]
        if not going_on.all():
            for slot in slots[~going_on].tolist():
                builder.sit_out(slot)  # its last token is under way
            slots = slots[going_on]
        if self._core.drafts_wanted:
            num_entering = self._core.admitter.num_entering
            builder.num_drafts = self._core.speculation.length(len(slots), num_entering, builder.budget.left)
        slots = self._grow(builder, slots)
        running.num_computed[slots] += 1
        running.num_tokens[slots] += 1
        if builder.num_drafts:
            running.assume_accepted(slots, builder.num_drafts)
        builder.advance(slots)

    def advance_prefills(self, builder: PlanBuilder) -> None:
        """The next chunk of every prompt that is not computed yet, oldest first."""
        running = self._running
        for slot in sorted(running.prefilling, key=lambda s: int(running.order[s])):
            if builder.budget.left == 0:
                return
            if slot in running.prefilling:  # not preempted by an older one
                self._advance_prefill(builder, slot)

    def chunk_size(self, builder: PlanBuilder, num_remaining: int) -> int:
        """Tokens of a prompt to compute now, taken from the budget."""
        threshold = self._core.limits.long_prefill_token_threshold
        alone = self._core.num_sequences == 1
        at_most = num_remaining if threshold == 0 or alone else threshold
        return builder.budget.try_add(num_remaining, at_most)

    def compute(self, builder: PlanBuilder, slot: int, num_tokens: int) -> None:
        """Books `num_tokens` of `slot`, whose blocks are there."""
        running = self._running
        total = int(running.num_tokens[slot])
        is_beam = bool(running.is_beam[slot])
        implied = int(running.num_computed[slot]) == total - 1 and not is_beam
        computed = int(running.num_computed[slot]) + num_tokens
        running.num_computed[slot] = computed
        samples = computed == total
        if samples:
            running.num_tokens[slot] = total + 1
        if samples or (computed == total - 1 and not is_beam):
            running.prefilling.discard(slot)
        drafts = implied and builder.num_drafts > 0
        if drafts and not builder.budget.try_all(builder.num_drafts):
            implied = drafts = False  # named, it does not builder
        if drafts:
            running.assume_accepted(slot, builder.num_drafts)
        builder.chunk(slot, num_tokens, implied=implied, samples=samples, drafts=drafts)

    def cache_full_blocks(self) -> None:
        """Puts on record which blocks the planned steps fill, so that the next sequence can share them."""
        if not self._kv.enable_caching:
            return
        running = self._running
        certain = running.num_computed - running.num_drafts_in_flight  # drafts may turn out wrong, or find no room
        certain = self._num_ordered = np.minimum(certain, running.capacity)
        filled = np.minimum(running.num_known, certain) // running.block_size
        for slot in (running.live & (filled > running.num_named)).nonzero()[0].tolist():
            self.name(slot, int(filled[slot]))

    def name(self, slot: int, num_filled: int) -> None:
        """Puts on record what the first `num_filled` blocks of `slot` hold."""
        running = self._running
        first = running.num_named[slot]
        self._kv.name(slot, running.sequence(slot).block_hashes[first:num_filled])
        if self._kv.parts is not None:
            self._kv.note_wholes(slot, [self._content(slot, i) for i in range(first, num_filled)])
        running.num_named[slot] = num_filled

    def cache_prompts(self, slots: list[int]) -> None:
        """An ordered step completes the prompts of `slots`: another sequence may have the same."""
        if self._kv.parts is not None:
            for slot in slots:
                if not self._running.is_beam[slot]:
                    self.cache_partial_block(slot)

    def cache_partial_block(self, slot: int) -> None:
        """Puts on record what `slot` holds behind its named blocks, as far as the steps ordered so far compute it."""
        if self._kv.parts is None:
            return
        running = self._running
        num_held = min(int(running.num_known[slot]), int(self._num_ordered[slot]))
        num_filled, rest = divmod(num_held, running.block_size)
        if num_filled > running.num_named[slot]:
            self.name(slot, num_filled)
        assert num_filled == running.num_named[slot], "what is on record stays"
        if rest >= self._core.limits.prefix_grain:
            known = self._content(slot, num_filled)
            self._kv.keep_part(slot, known[: PARENT_BYTES + rest * TOKEN_BYTES])

    def _content(self, slot: int, block: int) -> bytes:
        """What is known of a block of `slot`, as the index of parts takes it."""
        return self._running.sequence(slot).hash_before(block) + self._running.known_block(slot, block)

    def _advance_prefill(self, builder: PlanBuilder, slot: int) -> None:
        running = self._running
        computed = int(running.num_computed[slot])
        room = int(running.capacity[slot]) + self._kv.pool.num_free * running.block_size - computed
        if room <= 0:
            self.make_room(builder)
            return
        wanted = self.chunk_size(builder, min(int(running.num_tokens[slot]) - computed, room))
        blocks = self._kv.grow(slot, computed + wanted)
        assert blocks is not None, "there is room"
        running.capacity[slot] += len(blocks) * running.block_size
        builder.gain(slot, blocks)
        self.compute(builder, slot, wanted)

    def _grow(self, builder: PlanBuilder, slots: Slots) -> Slots:
        """Gives a block to each of `slots` that needs one for its next token; returns those that can advance."""
        running = self._running
        if builder.num_drafts or any(flight.drafts is not None for flight in self._core.flights):
            return self._grow_for_drafts(builder, slots)
        needy = slots[running.num_computed[slots] >= running.capacity[slots]]
        if len(needy) == 0:
            return slots
        if len(needy) <= self._kv.pool.num_free:
            blocks = self._kv.append_each(needy.tolist())
            running.capacity[needy] += running.block_size
            for slot, block in zip(needy.tolist(), blocks, strict=True):
                builder.gain(slot, [block])
            return slots
        return self._grow_scarce(builder, slots, needy)

    def _grow_for_drafts(self, builder: PlanBuilder, slots: Slots) -> Slots:
        """Room for the case that all drafts turn out right, if there are blocks for that; else for whoever may have no
        room for a single token. The last token of all is never computed."""
        running = self._running
        assumed = running.num_computed[slots] + 1 + builder.num_drafts
        lacking = np.minimum(assumed, running.limit[slots] - 1) - running.capacity[slots]
        missing = -(-lacking // running.block_size)
        needy = np.flatnonzero(missing > 0)
        if int(missing[needy].sum()) > self._kv.pool.num_free:
            least = running.num_computed[slots] - running.num_drafts_in_flight[slots]
            return self._grow_scarce(builder, slots, slots[least >= running.capacity[slots]])
        for slot, count in zip(slots[needy].tolist(), missing[needy].tolist(), strict=True):
            builder.gain(slot, self._kv.append(slot, count))
            running.capacity[slot] += count * running.block_size
        return slots

    def _grow_scarce(self, builder: PlanBuilder, slots: Slots, needy: Slots) -> Slots:
        running = self._running
        waits: set[int] = set()
        for slot in sorted(needy.tolist(), key=lambda s: int(running.order[s])):
            if not running.live[slot]:
                continue  # preempted for an older one
            if self._kv.pool.num_free == 0:
                self.make_room(builder)
            if running.live[slot] and self._kv.pool.num_free:
                builder.gain(slot, self._kv.append_each([slot]))
                running.capacity[slot] += running.block_size
            elif running.live[slot]:
                waits.add(slot)
                builder.sit_out(slot)
        return np.array([s for s in slots.tolist() if running.live[s] and s not in waits], dtype=np.intp)

    def make_room(self, builder: PlanBuilder) -> None:
        """Preempts a sequence, which may be the one in need, unless blocks are about to come back anyway."""
        builder.short_of_blocks = True
        if self._kv.num_fenced:
            return
        victim = self._core.waiting.victim(self._running)
        if not builder.moves(victim):  # beams that have just moved must stay
            for slot in self._core.preempt(victim):
                builder.drop(slot)
