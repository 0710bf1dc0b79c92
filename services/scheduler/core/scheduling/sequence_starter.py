"""Starts sequences: finds their cached prefix, takes a slot and schedules the first chunk."""

from __future__ import annotations

from collections.abc import Sequence as Blocks
from typing import NamedTuple

from quire.services.scheduler.core.plan import SequenceStarted
from quire.services.scheduler.core.prerequisites.siblings import Siblings
from quire.services.scheduler.core.scheduling.chunks import chunk_size, least_chunk
from quire.services.scheduler.core.sequences.media import first_start, item_around
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder
from quire.services.scheduler.kv_cache.match import Match
from quire.services.scheduler.kv_cache.part_index import BlockPart


class CachedPrefix(NamedTuple):
    """Computed tokens that a sequence starts with: full blocks, then perhaps the beginning of another block."""

    full_blocks: Blocks[int]
    num_cached: int  # tokens
    reused_block: int | None = None  # unowned partial block with the remaining tokens, taken over without a copy
    copied_blocks: Blocks[int] = ()  # blocks of each group with the remaining tokens, to be copied
    match: Match | None = None  # match of the full blocks; None: they are a running sibling's
    num_null: int = 0  # null blocks among the full ones (slid out of the window)

    @property
    def shared(self) -> list[int]:
        """Blocks that the sequence shares and need not allocate."""
        return list(self.full_blocks) if self.reused_block is None else [*self.full_blocks, self.reused_block]

    @property
    def num_shared(self) -> int:
        return len(self.full_blocks) - self.num_null + (self.reused_block is not None)


class SequenceStarter:
    """Finds the cached prefix of sequences and beams, decides whether they fit, and starts those that do."""

    def __init__(self, state: CoreState, siblings: Siblings) -> None:
        self._state, self._siblings = state, siblings
        self._plain, self._has_windows = state.kv.groups.plain, state.kv.groups.has_windows
        self._has_states = state.kv.groups.has_states
        self._looked_up: tuple[int, Match] | None = None  # key and match of the head of the queue that did not fit

    def keep_match(self, sequence: Sequence, start: CachedPrefix) -> None:
        """Keeps the match of a sequence that did not fit, for the next step."""
        self._looked_up = None if start.match is None else (sequence.key, start.match)

    def find_cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        """Returns the prefix that a sibling has computed, else the full blocks in the prefix cache and, after them,
        a matching part of a block, which is taken over or copied. Allocates and changes nothing."""
        state, size = self._state, self._state.limits.block_size
        donor = None if self._has_states else self._siblings.donor(sequence)  # a recurrent state is past the last token
        if donor is not None and state.kv.has_needed_blocks(donor, sequence.num_tokens - 1):
            return self._prefix_of_sibling(donor, sequence.num_tokens)
        match = self._match(sequence)
        full_blocks = match.blocks
        start = CachedPrefix(
            full_blocks, len(full_blocks) // state.kv.num_groups * size, match=match, num_null=match.num_null
        )
        part = self._match_part(sequence, len(full_blocks))
        if part is None:
            return start
        assert part.num_tokens < size, "whole blocks have been found"
        num_cached = start.num_cached + part.num_tokens
        is_free = state.kv.pool.references(part.block) == 0
        if part.is_all and is_free:
            return CachedPrefix(
                full_blocks, num_cached, reused_block=part.block, match=match
            )  # no other sequence uses the block: no copy
        with_copy = CachedPrefix(full_blocks, num_cached, copied_blocks=(part.block,), match=match)
        return with_copy if not is_free or self.fits_now(sequence, with_copy, state.limits.watermark_blocks) else start

    def _prefix_of_sibling(self, donor: int, num_tokens: int) -> CachedPrefix:
        """Returns the first `num_tokens` tokens of the sibling in slot `donor` as a cached prefix: its full blocks
        are shared, its partial block of each KV group is copied."""
        kv, size = self._state.kv, self._state.kv.num_groups
        table, end = kv.table(donor), num_tokens // kv.block_size * size
        last = table[end : end + size] if num_tokens % kv.block_size else ()
        full_blocks = table[:end]
        return CachedPrefix(
            full_blocks, num_tokens, copied_blocks=last, num_null=full_blocks.count(0) if kv.groups.has_windows else 0
        )

    def _match_part(self, sequence: Sequence, num_whole: int) -> BlockPart | None:
        """Returns a cached block whose beginning matches the tokens after the sequence's first `num_whole` blocks,
        which are cached as a whole; None if there is none, or the sequence skips the cache.

        A match ends before the next picture and before tokens whose prompt log-probabilities are asked for, and has at
        least `prefix_grain` tokens. Beams never use one: they are admitted all or none and count on every block that is
        free now."""
        state, size = self._state, self._state.limits.block_size
        if state.kv.parts is None or sequence.skip_reading_prefix_cache or sequence.is_beam:
            return None
        begin = num_whole * size
        end = min(begin + size, sequence.num_tokens)
        if sequence.asks_prompt_logprobs:
            end = min(end, sequence.prompt_logprobs_from - 1)
        if sequence.media:
            end = first_start(sequence.media, begin, end)  # other pictures have the same tokens
        if end - begin < state.limits.prefix_grain:
            return None
        tokens = sequence.tokens.column(begin, end)
        return state.kv.match_part(sequence.hash_before(num_whole) + tokens)

    def _match(self, sequence: Sequence) -> Match:
        """Returns the cached full blocks that the sequence may start with, without those whose prompt
        log-probabilities it needs. Reuses the match kept by keep_match() if it is of this sequence."""
        if self._looked_up is not None and self._looked_up[0] == sequence.key:
            match = self._looked_up[1]
            match.refresh()
        else:
            match = self._state.kv.match(() if sequence.skip_reading_prefix_cache else sequence.block_hashes)
        if self._has_states or sequence.asks_prompt_logprobs:
            match.truncate(self.max_readable_blocks(sequence))
        if self._state.limits.whole_media and sequence.media:
            self._end_outside_items(match, sequence)
        return match

    def _end_outside_items(self, match: Match, sequence: Sequence) -> None:
        """Shortens the match until it ends inside of no media item."""
        kv = self._state.kv
        while (item := item_around(sequence.media, len(match.blocks) // kv.num_groups * kv.block_size)) is not None:
            match.truncate(item.offset // kv.block_size)

    def max_readable_blocks(self, sequence: Sequence) -> int:
        """Returns the number of leading blocks that may be read from the cache: those before the first prompt
        log-probability that is asked for. With recurrent states, the last token has to be computed again, which is only
        possible from a state before it."""
        size = self._state.limits.block_size
        most = len(sequence.block_hashes)
        if self._has_states:
            most = min(most, (sequence.num_tokens - 1) // size)
        if sequence.asks_prompt_logprobs:
            most = min(most, (sequence.prompt_logprobs_from - 1) // size)
        return most

    def fits_step(self, builder: PlanBuilder, sequence: Sequence, start: CachedPrefix) -> bool:
        """Returns whether the step has room for the least chunk after the cached prefix."""
        least = least_chunk(self._state, sequence, min(start.num_cached, sequence.num_tokens - 1))
        return least == 1 or builder.budget.has_room(least)

    def fits_now(self, sequence: Sequence, start: CachedPrefix, num_left: int) -> bool:
        """Returns whether all known tokens fit in addition to the cached prefix, leaving `num_left` blocks free."""
        kv = self._state.kv
        num_shared = len(start.full_blocks) // kv.num_groups + (start.reused_block is not None)
        missing = kv.blocks_for(sequence.num_tokens) - num_shared
        missing = missing if self._plain else kv.groups.cost(missing)
        return self._has_room(start, missing + self.num_missing_cross(sequence) + num_left)

    def fits_alone(self, sequence: Sequence, start: CachedPrefix) -> bool:
        """Returns whether the sequence fits if it is computed in chunks as small as necessary."""
        kv = self._state.kv
        num_shared = len(start.full_blocks) // kv.num_groups + (start.reused_block is not None)
        missing = kv.groups.least_cost(kv.blocks_for(sequence.num_tokens) - num_shared)
        return self._has_room(start, missing + self.num_missing_cross(sequence))

    def num_missing_cross(self, sequence: Sequence) -> int:
        """Returns the number of free blocks that the encoder's output of the sequence takes."""
        cross = self._state.kv.cross
        return 0 if cross is None else cross.num_missing(sequence.media[0].identifier, sequence.num_encoder_rows)

    def _has_room(self, start: CachedPrefix, missing: int) -> bool:
        """Returns whether `missing` new blocks are free in addition to the cached ones, which are free as well until
        the sequence shares them."""
        kv = self._state.kv
        if missing > kv.pool.num_free:
            return False
        if missing + start.num_shared < kv.pool.num_free:
            return True  # enough even if all cached blocks are unowned
        return missing <= kv.pool.num_free - self._num_unowned(start)

    def _num_unowned(self, start: CachedPrefix) -> int:
        """Returns the number of cached blocks without an owner: once the sequence shares them they are no longer
        free."""
        partial = start.copied_blocks if start.reused_block is None else (start.reused_block,)
        num_unowned = 0 if start.match is None else start.match.num_free
        return num_unowned + sum(self._state.kv.pool.references(block) == 0 for block in partial)

    def start_beam(self, builder: PlanBuilder, beam: Sequence) -> None:
        """Starts one beam of a search that fits: finds its cached prefix, records how much was cached, takes a slot
        and schedules the first chunk."""
        start = self.find_cached_prefix(beam)
        beam.num_cached_tokens = start.num_cached
        self.start_sequence(builder, beam, start)

    def start_sequence(self, builder: PlanBuilder, sequence: Sequence, start: CachedPrefix) -> None:
        """Takes a slot for `sequence`, allocates blocks, schedules its first chunk and the copies of partial cached
        blocks, and records the hashes of the blocks that the chunk fills. The caller has checked that slot and
        blocks are free."""
        state, tables, kv, num_tokens = self._state, self._state.tables, self._state.kv, sequence.num_tokens
        num_computed = min(start.num_cached, num_tokens - 1)  # the last token's logits are always needed
        for block in start.copied_blocks:
            kv.pin(block)
        slot = tables.admit(builder, sequence, start.shared, start.num_cached, num_computed)
        if sequence.is_suspect:
            state.suspects.add(slot)
        wanted = num_tokens - num_computed
        if self._has_windows:
            wanted = self._limit_to_free_blocks(slot, num_computed, wanted)
        chunk = chunk_size(state, builder, sequence, num_computed, wanted)
        blocks = tables.grow(builder, slot, num_computed + chunk)
        if start.copied_blocks:
            builder.copy(start.copied_blocks, blocks[: kv.num_groups])
        tables.schedule_tokens(builder, slot, chunk)
        if state.limits.caches_prefixes and not self._has_states:  # the next admitted sequence may share them
            tables.cache_blocks(slot, min(num_tokens, num_computed + chunk) // kv.block_size)

    def _limit_to_free_blocks(self, slot: int, num_computed: int, wanted: int) -> int:
        """Returns how many of `wanted` tokens there are blocks for: a sliding window frees blocks before the next
        chunk."""
        kv, capacity = self._state.kv, int(self._state.running.capacity[slot])
        return min(wanted, capacity + kv.num_free * kv.block_size - num_computed)

    def record_admission(self, sequence: Sequence, num_cached: int, now: float) -> None:
        """Sets the status of a sequence that got a slot to RUNNING and updates counters; at the first admission it
        also charges the uncached prompt tokens to the policy and emits SequenceStarted. `now`: seconds."""
        state, counts, num_tokens = self._state, self._state.counts, sequence.num_tokens
        num_read = min(num_cached, num_tokens - 1)  # the last token is always computed again
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
                return  # no frontend waits for it
            for output in sequence.outputs or (sequence,):
                output.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
                state.events.started.append(SequenceStarted(output, now - sequence.queued_at, sequence.encode_s))
