"""The scheduler's core for one worker: schedule() plans a step, apply() applies its result.

Several steps (PipelineDepth) are in flight at a time, so schedule() works on the state as it will be once they have
returned: every sampled token counts as known, although its value comes later.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from quire.services.scheduler.core.beam.beams import BeamScheduler
from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.drafts.speculation import DraftController
from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import Events, StepPlan, StepResult, finished_events
from quire.services.scheduler.core.prerequisites.encoder_outputs import NONE_CACHED, EncoderOutputs
from quire.services.scheduler.core.prerequisites.grammars import Grammars
from quire.services.scheduler.core.prerequisites.host_blocks import HostBlocks
from quire.services.scheduler.core.prerequisites.late_queries import QueryVectors
from quire.services.scheduler.core.prerequisites.peer_blocks import PeerFetches
from quire.services.scheduler.core.prerequisites.siblings import Siblings
from quire.services.scheduler.core.results import ResultProcessor
from quire.services.scheduler.core.scheduling.admission import Admitter
from quire.services.scheduler.core.scheduling.growth import RunningScheduler
from quire.services.scheduler.core.scheduling.sequence_starter import SequenceStarter
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus, WorkerLoss
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import InFlightStep, PlanBuilder
from quire.services.scheduler.core.timing.deadlines import Deadlines
from quire.services.scheduler.core.timing.step_times import ChunkLimit, PipelineDepth, PromptPace, StepTimes
from quire.services.scheduler.kv_cache.block_pool import BlockUse, Observer


class Core:
    """Owns the sequences of one worker and all bookkeeping of its KV blocks."""

    def __init__(self, limits: CoreLimits, counts: CoreCounts | None = None, observer: Observer | None = None) -> None:
        """Creates a core without sequences. `counts`: counters that outlive the attachment; None: new ones.
        `observer`: receives the changes of the set of cached block hashes."""
        self.limits = limits
        self.counts = CoreCounts() if counts is None else counts
        self.state = CoreState(limits, self.counts, observer)
        self.kv, self.running, self.waiting = self.state.kv, self.state.running, self.state.waiting
        self.steps_in_flight = self.state.steps_in_flight
        self._make_prerequisites()
        self.depth = PipelineDepth(limits.max_steps_in_flight, limits.num_micro_batches)
        self._micro_batch = 0  # of the next step that has work
        self.speculation = DraftController(
            limits.num_speculative_tokens, fixed=limits.fixed_draft_length, counts=self.counts.drafts
        )
        self._chunk_limit = ChunkLimit(limits.longest_stream_gap_s, limits.max_num_batched_tokens)
        self._pace = PromptPace()
        self._step_times = StepTimes()
        self._last_applied_at = -math.inf
        self._deadlines = Deadlines(self.state.sequences)
        self._step_ids = itertools.count(1)
        self._starter = SequenceStarter(self.state, self.siblings)
        self._beams = BeamScheduler(self.state, self._starter)
        sources = [source for source in (self.host_blocks, self.peer_blocks) if source is not None]
        self._admitter = Admitter(
            self.state,
            self._starter,
            self._pace,
            self._beams.admit,
            sources=sources,
            encoder_outputs=self.encoder_outputs,
        )
        self._running_scheduler = RunningScheduler(self.state, self.speculation, lambda: self._admitter.num_new_seqs)
        self._results = ResultProcessor(self.state, self._beams, self.counts.drafts)

    def _make_prerequisites(self) -> None:
        """Creates the prerequisites that sequences of this worker may wait for, in the order in which sequences join
        them."""
        limits, state, counts = self.limits, self.state, self.counts
        hashed = limits.block_size if limits.caches_prefixes else 0
        self.grammars = Grammars()
        self.queries = QueryVectors(limits.num_query_vectors, hashed, counts, state, state.queue)
        cross = self.kv.cross
        has_keys = (
            (lambda _: False) if cross is None else (lambda item: cross.is_cached(item.identifier, item.num_embeddings))
        )
        self.encoder_outputs = EncoderOutputs(limits.encoder_capacity, state.queue, has_keys, self._num_skippable)
        self.siblings = Siblings(state.queue)
        stores = limits.tiers.num_host_blocks and limits.caches_prefixes
        self.host_blocks = HostBlocks(self.kv, limits.tiers, counts) if stores else None
        shares = limits.caches_prefixes and self.kv.groups.plain
        self.peer_blocks = PeerFetches(self.kv, counts, lambda: state.last_ordered) if shares else None
        every = (
            self.grammars,
            self.queries if limits.num_query_vectors else None,
            self.encoder_outputs if limits.encoder_capacity else None,
            self.siblings,
            self.host_blocks,
            self.peer_blocks,
        )
        state.queue.set_prerequisites([prerequisite for prerequisite in every if prerequisite is not None])

    # Inputs.

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. A sequence that can never run on this worker ends with an error at once. If this raises,
        the core holds nothing of the sequence."""
        refusal = self.limits.refusal(sequence.num_tokens, sequence.width, samples=not sequence.samples_nothing)
        if refusal is None and sequence.query is not None:
            refusal = self.limits.refusal_of_query(sequence.query.num_tokens)
        if refusal is None and (sequence.media or self.limits.cross_length):
            refusal = self.limits.refusal_of_media(sequence.media, sequence.num_tokens)
        if refusal is not None:
            sequence.status = SequenceStatus.FINISHED
            self.state.events.finished += finished_events(
                sequence, Reason.ERROR, failure=Failure("INVALID_ARGUMENT", refusal)
            )
            return
        sequence.max_total_tokens = min(sequence.max_total_tokens, self.limits.max_model_len)
        if sequence.search is not None:
            sequence.search.limit(sequence.max_total_tokens - sequence.num_prompt_tokens)
        self._deadlines.add(sequence)
        self.state.add(sequence)

    def cancel(self, key: int, reason: Reason = Reason.CANCELLED) -> None:
        """Finishes a sequence unless it has finished already. Its blocks are free once the steps in flight that name it
        have returned."""
        sequence = self.state.sequences.get(key)
        if sequence is not None:
            self.state.finish(sequence, reason)

    def on_grammar_prepared(self, grammar_id: bytes, failure: Failure | None = None) -> None:
        """Handles the worker's answer to a grammar order: the grammar is ready, and the sequences that waited for it
        are queued, or it could not be compiled (`failure`), and they finish with this error."""
        for sequence in self.grammars.complete(grammar_id, failed=failure is not None):
            if failure is None:
                self.state.queue.enqueue(sequence, after=self.grammars)
            else:
                self.state.finish(sequence, Reason.ERROR, failure=failure)

    def on_media_encoded(self, identifier: bytes, failure: Failure | None = None) -> None:
        """Handles the worker's answer to an encoder order: the item's rows are ready, and the sequences that waited
        for them are queued, or the item could not be fetched or encoded (`failure`), and they finish with this
        error."""
        for sequence in self.encoder_outputs.complete(identifier, failed=failure is not None):
            if failure is None:
                self.state.queue.enqueue(sequence, after=self.encoder_outputs)
            else:
                self.state.finish(sequence, Reason.ERROR, failure=failure)

    def on_transfer_done(self, transfer_id: int, *, failed: bool = False, lost: Collection[int] = ()) -> None:
        """Handles the end of a host or disk transfer; the sequences that waited for it are queued again. `lost`:
        indices of blocks that the disk did not store or return."""
        assert self.host_blocks is not None, "it was ordered"
        self.state.queue.unblock(self.host_blocks.complete(transfer_id, failed=failed, lost=lost))

    def on_fetch_done(self, fetch_id: int, *, failed: bool = False) -> None:
        """Handles the end of a fetch of blocks from another worker."""
        assert self.peer_blocks is not None, "it was ordered"
        self.state.queue.unblock(self.peer_blocks.complete(fetch_id, failed=failed))

    def unblock(self, sequences: list[Sequence]) -> None:
        """Queues sequences that no longer wait for blocks of other workers."""
        self.state.queue.unblock(sequences)

    # Scheduling.

    def schedule(self, now: float) -> StepPlan | None:
        """Returns the next step and records it as in flight, or returns None if there is nothing to compute or
        enough steps are in flight. Finishes expired sequences first and may preempt sequences. `now`: seconds, from
        any fixed origin."""
        self.expire(now)
        if len(self.steps_in_flight) >= self.depth.max_steps or now < self.next_at:
            return None
        if self.speculation.enabled and self.speculation.must_wait_for(self.steps_in_flight):
            return None
        builder = self._build_next(now)
        while builder.num_tokens == 0 and builder.short_of_blocks and not self.steps_in_flight:
            builder = self._build_next(now)  # every iteration preempted a sequence and freed its blocks
        return self._commit(builder, now) if builder.num_tokens else None

    def apply(self, result: StepResult, now: float) -> None:
        """Applies the result of the oldest step in flight, whose id it must have, and records the step's duration;
        take_events() then returns what it produced. `now`: seconds, from the origin that schedule() uses."""
        flight = self.steps_in_flight.popleft()
        started_at = self._start_time(flight)
        self._step_times.observe(flight.num_tokens, now - started_at)
        self._pace.observe(flight.num_tokens, len(flight.slots), now - started_at)
        self._chunk_limit.observe(
            flight.num_prompt_tokens, flight.num_tokens - flight.num_prompt_tokens, now - started_at
        )
        self.depth.observe(now - started_at)
        if self.speculation.enabled:
            self.speculation.observe(flight, result, now - started_at)
        self._last_applied_at = now
        assert flight.step_id == result.step_id, f"step {flight.step_id} is due, not {result.step_id}"
        self.state.last_applied = flight.step_id
        if self.kv.num_fenced:
            self.kv.pass_fence(flight.step_id)
        self._results.apply(flight, result)
        if self.host_blocks is not None and not self.steps_in_flight:
            self.host_blocks.store_filled()  # blocks of finished sequences: there may be no further step for a while

    def take_events(self) -> Events:
        events, self.state.events = self.state.events, Events()
        return events

    # State.

    @property
    def next_at(self) -> float:
        """Time before which schedule() plans no step, so that a long step's successor is planned late; -inf if it
        may plan now."""
        if len(self.steps_in_flight) != self.depth.num_stages:
            return -math.inf
        flight = self.steps_in_flight[0]
        return self.depth.next_at(self._start_time(flight), self._step_times.expected(flight.num_tokens))

    @property
    def has_work(self) -> bool:
        return bool(self.state.sequences)

    @property
    def num_sequences(self) -> int:
        return len(self.state.sequences)

    @property
    def drafts_wanted(self) -> bool:
        """Whether a running sequence is one that the worker drafts for."""
        return self._running_scheduler.drafts_wanted

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the sequences without a slot; 1 for each sequence whose prompt a sibling computes."""
        return self.state.queue.num_tokens

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot, blocked ones included."""
        return self.state.queue.num_sequences

    def estimate_prompt_s(self, num_tokens: int) -> float:
        """Expected seconds to compute `num_tokens` prompt tokens; 0 while no prompt step has been measured."""
        return self._pace.seconds_for(num_tokens)

    @property
    def use(self) -> BlockUse:
        return self.kv.use

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to be computed before every sequence of this core has its next token."""
        running = self.running
        rest = sum(int(running.num_tokens[slot] - running.num_computed[slot]) for slot in running.prefilling)
        return self.num_waiting_tokens + rest + len(running) - len(running.prefilling)

    def num_cached(self, sequence: Sequence) -> int:
        """Tokens of `sequence` that need not be computed here, because they are cached on the device or in a tier below
        it."""
        start = self._starter.find_cached_prefix(sequence)
        if self.host_blocks is None or start.match is None or sequence.skip_reading_prefix_cache:
            return start.num_cached
        num_found = len(start.full_blocks) // self.kv.num_groups
        most = self._starter.max_readable_blocks(sequence) - num_found
        num_below = self.host_blocks.num_following(sequence.block_hashes, start.full_blocks, most)
        return max(start.num_cached, (num_found + num_below) * self.limits.block_size)

    def _num_skippable(self, sequence: Sequence) -> int:
        """Returns the leading tokens of `sequence` that are cached on the device, so that rows of media in them are not
        needed; NONE_CACHED for beams, and for items of cross attention."""
        if sequence.search is not None or self.kv.cross is not None:
            return NONE_CACHED
        return self._starter.find_cached_prefix(sequence).num_cached

    def find(self, key: int) -> Sequence | None:
        return self.state.sequences.get(key)

    def keys_of(self, owner: int) -> list[int]:
        return [key for key, sequence in self.state.sequences.items() if sequence.owner == owner]

    # Operations outside schedule() and apply().

    def preempt(self, slot: int) -> list[int]:
        """Preempts the sequence in `slot`; returns the slots that are free now."""
        return self.state.preempt(slot)

    def migrate_out(self, sequence: Sequence) -> None:
        """Removes a running sequence that another worker continues. Its blocks are free once the steps in flight that
        name it have returned; tokens that these steps sample for it are dropped."""
        self.state.migrate_out(sequence)

    def has_room_for_migrated(self, num_tokens: int, num_kept: int) -> bool:
        """Returns whether a sequence of `num_tokens` tokens, `num_kept` blocks of which are reserved here, would be
        admitted now."""
        missing = self.kv.blocks_for(num_tokens + 1) - num_kept + self.limits.watermark_blocks
        is_next = not self.waiting and self.running.num_free_slots > self.state.searches.num_reserved
        return is_next and missing <= self.kv.pool.num_free

    def evacuate(self, loss: WorkerLoss | None = None) -> list[Sequence]:
        """Removes and returns every unfinished sequence, in order of arrival, because the worker is gone. `loss`: set
        if the worker did not leave on its own; the sequences that ran are suspects."""
        return self.state.evacuate(loss)

    def evacuate_waiting(self) -> list[Sequence]:
        """Removes and returns the sequences without a slot, in order of arrival."""
        return self.state.evacuate_waiting()

    def expire(self, now: float) -> None:
        """Finishes the sequences whose deadline has passed. schedule() does this as well; this method is for the time
        in which nothing is scheduled."""
        if now < self._deadlines.soonest:
            return
        for sequence in self._deadlines.pop_expired(now):
            failure = Failure(
                "DEADLINE_EXCEEDED", f"the deadline passed while the sequence was {sequence.status.value}"
            )
            self.state.finish(sequence, Reason.DEADLINE, failure=failure)

    def reset_prefix_cache(self, preempt_running: bool = False) -> int | None:
        """Drops all cached prefixes; returns the number of blocks, or None if sequences run and may not be preempted.

        Only valid while no step and no transfer is in flight.
        """
        if preempt_running:
            by_age = np.argsort(-self.running.order, kind="stable")
            for slot in by_age[: len(self.running)].tolist():
                if self.running.live[slot]:  # an earlier preemption may have released all beams of its search
                    self.state.preempt(slot)
        if self.peer_blocks is not None:
            self.peer_blocks.release_reserved_blocks()
        if not self.kv.idle:
            return None
        self.queries.reset()
        self.encoder_outputs.reset()
        in_host_memory = 0 if self.host_blocks is None else self.host_blocks.clear()
        return self.kv.reset() + in_host_memory

    def _build_next(self, now: float) -> PlanBuilder:
        """Builds a step of the next micro-batch, in turn, that has something to compute."""
        most = self.limits.num_micro_batches
        builder = self._build(now, self._micro_batch)
        for _ in range(1, most):
            if builder.num_tokens or builder.short_of_blocks:
                break
            self._micro_batch = (self._micro_batch + 1) % most
            builder = self._build(now, self._micro_batch)
        self._micro_batch = (self._micro_batch + 1) % most
        return builder

    def _build(self, now: float, micro_batch: int) -> PlanBuilder:
        """Builds a step of one micro-batch: one token for each ready sequence, then prompt chunks, the beams of
        decided searches, and at last admissions. The token budget of beams is reserved before all others."""
        if self.kv.parts is not None:
            self.kv.parts.publish()
        self.state.tables.slide()
        builder = PlanBuilder(self.limits.max_num_batched_tokens, names_block_slots=self.speculation.enabled)
        builder.micro_batch = micro_batch
        searches = self.state.searches
        for_beams = searches.num_tokens_wanted if searches.by_root else 0
        builder.budget.remaining -= for_beams
        self._running_scheduler.advance_ready(builder)
        if self._chunk_limit.enabled and len(builder.ready) and not self.limits.whole_prompts:
            builder.budget.limit(self._chunk_limit.num_tokens)
        self._running_scheduler.advance_prefills(builder)
        builder.budget.remaining += for_beams
        if searches.by_root:
            self._beams.apply_decisions(builder)
        self._admitter.admit(builder, now)
        if searches.by_root:
            self._beams.skip_idle_beams(builder)
        return builder

    def _start_time(self, oldest: InFlightStep) -> float:
        return max(oldest.planned_at, self._last_applied_at)

    def _commit(self, builder: PlanBuilder, now: float) -> StepPlan:
        """Turns the built step into a plan: assigns its id, adds it to the steps in flight, charges its tokens to
        the policy, records the hashes of blocks that it fills and unblocks sequences that waited for its prompts."""
        step_id = self.state.last_ordered = next(self._step_ids)
        released = self.state.take_released() if self.state.released else []
        flight = builder.build_step_in_flight(step_id, self.running, now)
        self.steps_in_flight.append(flight)
        self.waiting.charge_output(self.running, flight.slots)
        self.state.tables.cache_full_blocks()
        if self.host_blocks is not None:
            self.host_blocks.store_filled()
        finishing = builder.completed_prompts
        if finishing:
            self.state.tables.cache_prompts(finishing)
            self.state.on_prompts_scheduled([self.running.sequence(slot) for slot in finishing])
        self.counts.steps += 1
        self.counts.scheduled_tokens += builder.num_tokens
        drafts = self.speculation.take_length_change(builder.num_drafts) if self.speculation.enabled else None
        plan = builder.build_plan(step_id, released, drafts)
        return replace(plan, dropped_queries=self.queries.take_dropped()) if self.queries.dropped else plan
