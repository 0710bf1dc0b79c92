"""Letting waiting sequences in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.plan import Admission, Started
from services.scheduler.core.sequence import Sequence, Status
from services.scheduler.core.step import StepDraft

if TYPE_CHECKING:
    from services.scheduler.core.core import Core


class Admitter:
    """The waiting half of schedule(). Nobody overtakes: it stops at the first sequence that cannot come in."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def admit(self, draft: StepDraft, now: float) -> None:
        core = self._core
        while core.waiting and draft.budget.left and core.running.num_free_slots:
            sequence = core.waiting.peek()
            if sequence.fence > core.last_applied:
                return  # a token of it is still to come back
            hits = [] if sequence.skip_reading_prefix_cache else core.kv.match(sequence.block_hashes)
            if not self._fits(sequence, hits):
                return
            core.next_waiting()
            self._enter(draft, sequence, hits, now)

    def _fits(self, sequence: Sequence, hits: list[int]) -> bool:
        """All known tokens must fit now, so that a prompt is not half computed and then preempted."""
        core = self._core
        spare = core.limits.watermark_blocks if len(core.running) else 0
        missing = core.kv.blocks_for(sequence.num_tokens) - len(hits)
        return missing + spare <= core.kv.num_takeable(hits)

    def _enter(self, draft: StepDraft, sequence: Sequence, hits: list[int], now: float) -> None:
        core = self._core
        num_cached = len(hits) * core.limits.block_size
        num_computed = min(num_cached, sequence.num_tokens - 1)  # the last token's logits are always needed
        self._count(sequence, num_cached, now)
        num_tokens, token_ids = sequence.num_tokens, bytes(sequence.tokens)
        slot = core.running.enter(sequence, num_computed)
        core.kv.admit(slot, hits)
        core.running.num_named[slot] = len(hits)
        chunk = core.grower.chunk_size(draft, num_tokens - num_computed)
        blocks = core.kv.grow(slot, num_computed + chunk)
        assert blocks is not None, "_fits saw to it"
        core.running.capacity[slot] = (len(hits) + len(blocks)) * core.limits.block_size
        draft.gain(slot, hits + blocks)
        draft.admit(Admission(slot, sequence, token_ids, num_cached))
        core.grower.compute(draft, slot, chunk)
        if core.limits.enable_prefix_caching:  # the next one to come in may start with the same blocks
            core.grower.name(slot, min(num_tokens, num_computed + chunk) // core.limits.block_size)

    def _count(self, sequence: Sequence, num_cached: int, now: float) -> None:
        counts = self._core.counts
        sequence.status = Status.RUNNING
        if sequence.started:
            counts.resumed_tokens += sequence.num_tokens
            counts.resumed_cached_tokens += num_cached
        else:
            counts.prompt_tokens += sequence.num_tokens
            counts.cached_tokens += num_cached
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            sequence.started = True
            self._core.events.started.append(Started(sequence, now - sequence.arrival))
