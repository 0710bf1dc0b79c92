"""Letting waiting sequences in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.plan import Admission, Started
from services.scheduler.core.sequence import Failure, Reason, Sequence, Status
from services.scheduler.core.step import StepDraft

if TYPE_CHECKING:
    from services.scheduler.core.core import Core

TOO_LATE = Failure("DEADLINE_EXCEEDED", "its first token could not have come before the deadline; nothing was computed")


@dataclass(frozen=True, slots=True)
class Start:
    """What a sequence finds computed."""

    shared: list[int]  # full blocks
    num_cached: int  # tokens
    copied: int | None = None  # the block that holds the rest of them, and of which it needs a copy


class Admitter:
    """The waiting half of schedule(). Nobody overtakes: it stops at the first sequence that cannot come in."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def admit(self, draft: StepDraft, now: float) -> None:
        core = self._core
        while core.waiting and draft.budget.left and core.running.num_free_slots > core.beams.num_reserved:
            sequence = core.waiting.peek()
            if sequence.fence > core.last_applied:
                return  # a token of it is still to come back
            if sequence.search is not None:
                if not core.beams.admit(draft, sequence, now):
                    return
                continue
            start = self._start(sequence)
            if self._too_late(sequence, start, now):
                core.end(sequence, Reason.DEADLINE, failure=TOO_LATE)
                continue
            if not self._fits(sequence, start.shared) or (sequence.suspect and core.suspects):
                return
            core.next_waiting()
            self._enter(draft, sequence, start, now)

    def _start(self, sequence: Sequence) -> Start:
        """From a sibling that has computed the prompt, else from the prefix cache."""
        core, size = self._core, self._core.limits.block_size
        donor = core.siblings.donor(sequence)
        if donor is not None:
            table, whole = core.kv.table(donor), sequence.num_tokens // size
            return Start(list(table[:whole]), sequence.num_tokens, table[whole] if sequence.num_tokens % size else None)
        hits = self._match(sequence)
        return Start(hits, len(hits) * size)

    def _match(self, sequence: Sequence) -> list[int]:
        """Blocks of the prefix cache that it may start with: none that the log-probabilities of its prompt need."""
        if sequence.skip_reading_prefix_cache:
            return []
        hits = self._core.kv.match(sequence.block_hashes)
        if sequence.asks_prompt_logprobs:
            del hits[(sequence.prompt_logprobs_from - 1) // self._core.limits.block_size :]
        return hits

    def _fits(self, sequence: Sequence, hits: list[int]) -> bool:
        """All known tokens must fit now, so that a prompt is not half computed and then preempted; and what everybody
        is expected to grow to must fit until they end."""
        core, limits = self._core, self._core.limits
        missing = core.kv.blocks_for(sequence.num_tokens) - len(hits)
        if len(core.running) == 0:
            return missing <= core.kv.num_takeable(hits)
        if missing + limits.watermark_blocks > core.kv.num_takeable(hits):
            return False
        shared = core.kv.pool.num_shared + sum(core.kv.pool.references(block) > 0 for block in hits)
        usable = limits.usable_blocks - limits.watermark_blocks + shared
        return core.forecast.fits(core.running, sequence, usable, limits.block_size)

    def _too_late(self, sequence: Sequence, start: Start, now: float) -> bool:
        """Its deadline will have passed before it can have a single token."""
        if sequence.deadline == math.inf:
            return False
        uncached = sequence.num_tokens - start.num_cached
        return now + self._core.pace.seconds_for(uncached) >= sequence.deadline

    def _enter(self, draft: StepDraft, sequence: Sequence, start: Start, now: float) -> None:
        self.count(sequence, start.num_cached, now)
        self._occupy(draft, sequence, start)

    def occupy(self, draft: StepDraft, beam: Sequence) -> None:
        """A slot for a beam of a search that fits."""
        start = self._start(beam)
        beam.num_cached_tokens = start.num_cached
        self._occupy(draft, beam, start)

    def _occupy(self, draft: StepDraft, sequence: Sequence, start: Start) -> None:
        core, hits, num_cached = self._core, start.shared, start.num_cached
        num_computed = min(num_cached, sequence.num_tokens - 1)  # the last token's logits are always needed
        num_tokens, token_ids = sequence.num_tokens, bytes(sequence.tokens)
        slot = core.running.enter(sequence, num_computed)
        if sequence.suspect:
            core.suspects.add(slot)
        core.kv.admit(slot, hits)
        core.running.num_named[slot] = len(hits)
        chunk = core.grower.chunk_size(draft, num_tokens - num_computed)
        blocks = core.kv.grow(slot, num_computed + chunk)
        assert blocks is not None, "_fits saw to it"
        core.running.capacity[slot] = (len(hits) + len(blocks)) * core.limits.block_size
        draft.gain(slot, hits + blocks)
        if start.copied is not None:
            draft.copy(start.copied, blocks[0])
        draft.admit(Admission(slot, sequence, token_ids, num_cached))
        core.grower.compute(draft, slot, chunk)
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
