"""Entering: what a sequence finds computed when it comes in, and its slot."""

from __future__ import annotations

from collections.abc import Sequence as Blocks
from typing import NamedTuple

from quire.services.scheduler.core.plan import SequenceStarted
from quire.services.scheduler.core.prerequisites.siblings import Siblings
from quire.services.scheduler.core.scheduling.chunks import chunk_size
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder
from quire.services.scheduler.kv_cache.match import Match
from quire.services.scheduler.kv_cache.part_index import BlockPart


class CachedPrefix(NamedTuple):
    """What a sequence finds computed: full blocks, then perhaps the beginning of another."""

    full_blocks: Blocks[int]
    num_cached: int  # tokens
    reused_block: int | None = (
        None  # the block that holds the rest of them, which an ended sequence left: it goes on in that
    )
    copied_blocks: Blocks[int] = ()  # those that hold the rest of them, of each group, and of which it needs copies
    match: Match | None = None  # that the whole ones are from; None: those of a sibling, which runs
    num_null: int = 0  # of the whole ones: where nobody looks any more

    @property
    def shared(self) -> list[int]:
        """All that it does not have to take."""
        return list(self.full_blocks) if self.reused_block is None else [*self.full_blocks, self.reused_block]

    @property
    def num_shared(self) -> int:
        return len(self.full_blocks) - self.num_null + (self.reused_block is not None)


class SequenceStarter:
    """The way in, of sequences that fit and of beams."""

    def __init__(self, state: CoreState, siblings: Siblings) -> None:
        self._state, self._siblings = state, siblings
        self._plain, self._has_windows = state.kv.groups.plain, state.kv.groups.has_windows
        self._has_states = state.kv.groups.has_states
        self._looked_up: tuple[int, Match] | None = None  # of the head that did not fit, by its key

    def keep_match(self, sequence: Sequence, start: CachedPrefix) -> None:
        """It did not fit, and will be looked at again."""
        self._looked_up = None if start.match is None else (sequence.key, start.match)

    def find_cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        """From a sibling that has computed the prompt, else from the prefix cache. Changes nothing."""
        state, size = self._state, self._state.limits.block_size
        donor = None if self._has_states else self._siblings.donor(sequence)  # whose state is past the last token
        if donor is not None and state.kv.has_needed_blocks(donor, sequence.num_tokens - 1):
            return self._prefix_of_sibling(donor, sequence.num_tokens)
        match = self._match(sequence)
        whole = match.blocks
        start = CachedPrefix(whole, len(whole) // state.kv.num_groups * size, match=match, num_null=match.num_null)
        part = self._match_part(sequence, len(whole))
        if part is None:
            return start
        assert part.num_tokens < size, "whole blocks have been found"
        num_cached = start.num_cached + part.num_tokens
        is_free = state.kv.pool.references(part.block) == 0
        if part.is_all and is_free:
            return CachedPrefix(whole, num_cached, reused_block=part.block, match=match)  # nobody misses it: no copy
        beside = CachedPrefix(whole, num_cached, copied_blocks=(part.block,), match=match)
        return beside if not is_free or self.fits_now(sequence, beside, state.limits.watermark_blocks) else start

    def _prefix_of_sibling(self, donor: int, num_tokens: int) -> CachedPrefix:
        """All that a sibling has computed."""
        kv, size = self._state.kv, self._state.kv.num_groups
        table, end = kv.table(donor), num_tokens // kv.block_size * size
        last = table[end : end + size] if num_tokens % kv.block_size else ()
        whole = table[:end]
        return CachedPrefix(
            whole, num_tokens, copied_blocks=last, num_null=whole.count(0) if kv.groups.has_windows else 0
        )

    def _match_part(self, sequence: Sequence, num_whole: int) -> BlockPart | None:
        """A block of the prefix cache that begins as the one behind the whole ones does. None for beams, which come in
        all or none and count on every block that is free now."""
        state, size = self._state, self._state.limits.block_size
        if state.kv.parts is None or sequence.skip_reading_prefix_cache or sequence.is_beam:
            return None
        begin = num_whole * size
        end = min(begin + size, sequence.num_tokens)
        if sequence.asks_prompt_logprobs:
            end = min(end, sequence.prompt_logprobs_from - 1)
        if end - begin < state.limits.prefix_grain:
            return None
        tokens = sequence.tokens.column(begin, end)
        return state.kv.match_part(sequence.hash_before(num_whole) + tokens)

    def _match(self, sequence: Sequence) -> Match:
        """Blocks of the prefix cache that it may start with: none that the log-probabilities of its prompt need."""
        if self._looked_up is not None and self._looked_up[0] == sequence.key:
            match = self._looked_up[1]
            match.refresh()
        else:
            match = self._state.kv.match(() if sequence.skip_reading_prefix_cache else sequence.block_hashes)
        if self._has_states or sequence.asks_prompt_logprobs:
            match.truncate(self.max_readable_blocks(sequence))
        return match

    def max_readable_blocks(self, sequence: Sequence) -> int:
        """Leading blocks that it may find computed: none that the log-probabilities of its prompt need. Where tokens
        change a state, the last one can only be computed in front of what it has changed."""
        size = self._state.limits.block_size
        most = len(sequence.block_hashes)
        if self._has_states:
            most = min(most, (sequence.num_tokens - 1) // size)
        if sequence.asks_prompt_logprobs:
            most = min(most, (sequence.prompt_logprobs_from - 1) // size)
        return most

    def fits_now(self, sequence: Sequence, start: CachedPrefix, num_left: int) -> bool:
        """Whether all known tokens have room beside what it finds, with so many blocks left over."""
        kv = self._state.kv
        num_shared = len(start.full_blocks) // kv.num_groups + (start.reused_block is not None)
        missing = kv.blocks_for(sequence.num_tokens) - num_shared
        return self._has_room(start, (missing if self._plain else kv.groups.cost(missing)) + num_left)

    def fits_alone(self, sequence: Sequence, start: CachedPrefix) -> bool:
        """Whether there is room if it is computed in chunks as small as need be."""
        kv = self._state.kv
        num_shared = len(start.full_blocks) // kv.num_groups + (start.reused_block is not None)
        return self._has_room(start, kv.groups.least_cost(kv.blocks_for(sequence.num_tokens) - num_shared))

    def _has_room(self, start: CachedPrefix, missing: int) -> bool:
        kv = self._state.kv
        if missing > kv.pool.num_free:
            return False
        if missing + start.num_shared < kv.pool.num_free:
            return True  # whoever has what it finds
        return missing <= kv.pool.num_free - self._num_unowned(start)

    def _num_unowned(self, start: CachedPrefix) -> int:
        """Blocks that it finds and nobody refers to: once it shares them nobody else can take them."""
        beside = start.copied_blocks if start.reused_block is None else (start.reused_block,)
        num_unowned = 0 if start.match is None else start.match.num_free
        return num_unowned + sum(self._state.kv.pool.references(block) == 0 for block in beside)

    def start_beam(self, builder: PlanBuilder, beam: Sequence) -> None:
        """A slot for a beam of a search that fits."""
        start = self.find_cached_prefix(beam)
        beam.num_cached_tokens = start.num_cached
        self.start_sequence(builder, beam, start)

    def start_sequence(self, builder: PlanBuilder, sequence: Sequence, start: CachedPrefix) -> None:
        """There is one, and there are blocks for all that `sequence` has."""
        state, tables, kv, num_tokens = self._state, self._state.tables, self._state.kv, sequence.num_tokens
        num_computed = min(start.num_cached, num_tokens - 1)  # the last token's logits are always needed
        slot = tables.admit(builder, sequence, start.shared, start.num_cached, num_computed)
        if sequence.is_suspect:
            state.suspects.add(slot)
        for block in start.copied_blocks:
            kv.pin(block)
        wanted = num_tokens - num_computed
        if self._has_windows:
            wanted = self._limit_to_free_blocks(slot, num_computed, wanted)
        chunk = chunk_size(state, builder, wanted)
        blocks = tables.grow(builder, slot, num_computed + chunk)
        if start.copied_blocks:
            builder.copy(start.copied_blocks, blocks[: kv.num_groups])
        tables.schedule_tokens(builder, slot, chunk)
        if state.limits.caches_prefixes and not self._has_states:  # the next one to come in may start with the same
            tables.cache_blocks(slot, min(num_tokens, num_computed + chunk) // kv.block_size)

    def _limit_to_free_blocks(self, slot: int, num_computed: int, wanted: int) -> int:
        """Of `wanted` tokens those that there are blocks for: a window gives some back before the next chunk."""
        kv, capacity = self._state.kv, int(self._state.running.capacity[slot])
        return min(wanted, capacity + kv.num_free * kv.block_size - num_computed)

    def record_admission(self, sequence: Sequence, num_cached: int, now: float) -> None:
        """It has a slot."""
        state, counts, num_tokens = self._state, self._state.counts, sequence.num_tokens
        num_read = min(num_cached, num_tokens - 1)  # the last is computed again, cached or not
        sequence.status = SequenceStatus.RUNNING
        if sequence.was_admitted:
            counts.resumed_tokens += num_tokens
            counts.resumed_cached_tokens += num_read
        else:
            counts.prompt_tokens += num_tokens
            counts.cached_tokens += num_read
            state.waiting.charge_prompt(sequence, max(0, num_tokens - num_cached))
            sequence.was_admitted = True
            if sequence.is_query:
                return  # nobody waits for it but documents
            for output in sequence.outputs or (sequence,):
                output.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
                state.events.started.append(SequenceStarted(output, now - sequence.queued_at))
