"""The scheduling of one worker: schedule() orders a step, apply() takes in what it did.

Several steps (timing/depth.py) are under way at a time, so schedule() works on the state as it will be once they are
done: every sampled token counts as known, though its value comes later.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from quire.services.scheduler.core.beam.beams import Beams
from quire.services.scheduler.core.counts import Counts
from quire.services.scheduler.core.drafts.speculation import DraftLengths
from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import Events, StepPlan, StepResult, finish
from quire.services.scheduler.core.prerequisites.grammars import Grammars
from quire.services.scheduler.core.prerequisites.host_blocks import HostBlocks
from quire.services.scheduler.core.prerequisites.late_queries import QueryVectors
from quire.services.scheduler.core.prerequisites.peer_blocks import PeerFetches
from quire.services.scheduler.core.prerequisites.siblings import Siblings
from quire.services.scheduler.core.results import ResultProcessor
from quire.services.scheduler.core.scheduling.admission import Admitter
from quire.services.scheduler.core.scheduling.entry import Entry
from quire.services.scheduler.core.scheduling.growth import Grower
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Loss, Sequence, SequenceStatus
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import Flight, PlanBuilder
from quire.services.scheduler.core.timing.chunk_limit import ChunkLimit
from quire.services.scheduler.core.timing.deadlines import Deadlines
from quire.services.scheduler.core.timing.depth import Depth
from quire.services.scheduler.core.timing.pace import PromptPace
from quire.services.scheduler.core.timing.step_times import StepTimes
from quire.services.scheduler.kv_cache.block_pool import BlockUse, Observer


class Core:
    """Owns the sequences of one worker and all knowledge of its KV blocks."""

    def __init__(self, limits: CoreLimits, counts: Counts | None = None, observer: Observer | None = None) -> None:
        self.limits = limits
        self.counts = Counts() if counts is None else counts
        self.state = CoreState(limits, self.counts, observer)
        self.kv, self.running, self.waiting = self.state.kv, self.state.running, self.state.waiting
        self.flights = self.state.flights
        self._make_prerequisites()
        self.depth = Depth(limits.max_steps_in_flight, limits.num_micro_batches)
        self._micro_batch = 0  # that the next step is of, if it has something to do
        self.speculation = DraftLengths(
            limits.num_speculative_tokens, fixed=limits.fixed_draft_length, counts=self.counts.drafts
        )
        self._chunk_limit = ChunkLimit(limits.longest_stream_gap_s, limits.max_num_batched_tokens)
        self._pace = PromptPace()
        self._step_times = StepTimes()
        self._last_applied_at = -math.inf
        self._deadlines = Deadlines(self.state.sequences)
        self._step_ids = itertools.count(1)
        self._entry = Entry(self.state, self.siblings)
        self._beams = Beams(self.state, self._entry)
        sources = [source for source in (self.host_blocks, self.peer_blocks) if source is not None]
        self._admitter = Admitter(self.state, self._entry, self._pace, self._beams.admit, sources)
        self._grower = Grower(self.state, self.speculation, lambda: self._admitter.num_entering)
        self._results = ResultProcessor(self.state, self._beams, self.counts.drafts)

    def _make_prerequisites(self) -> None:
        """Names what sequences of this worker may wait for, in the order in which they join it."""
        limits, state, counts = self.limits, self.state, self.counts
        hashed = limits.block_size if limits.caches_prefixes else 0
        self.grammars = Grammars()
        self.queries = QueryVectors(limits.num_query_vectors, hashed, counts, state, state.queue)
        self.siblings = Siblings(state.queue)
        stores = limits.tiers.num_host_blocks and limits.caches_prefixes
        self.host_blocks = HostBlocks(self.kv, limits.tiers, counts) if stores else None
        shares = limits.caches_prefixes and self.kv.groups.plain
        self.peer_blocks = PeerFetches(self.kv, counts, lambda: state.last_ordered) if shares else None
        every = (self.grammars, self.queries, self.siblings, self.host_blocks, self.peer_blocks)
        state.queue.set_prerequisites([prerequisite for prerequisite in every if prerequisite is not None])

    # What goes in.

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; one that can never run here ends with an error at once. If it raises, nothing is left of
        the sequence here."""
        refusal = self.limits.refusal(sequence.num_tokens, sequence.width, samples=not sequence.samples_nothing)
        if refusal is None and sequence.query is not None:
            refusal = self.limits.refusal_of_query(sequence.query.num_tokens)
        if refusal is not None:
            sequence.status = SequenceStatus.FINISHED
            self.state.events.finished += finish(sequence, Reason.ERROR, failure=Failure("INVALID_ARGUMENT", refusal))
            return
        sequence.max_total_tokens = min(sequence.max_total_tokens, self.limits.max_model_len)
        if sequence.search is not None:
            sequence.search.limit(sequence.max_total_tokens - sequence.num_prompt_tokens)
        self._deadlines.add(sequence)
        self.state.add(sequence)

    def cancel(self, key: int, reason: Reason = Reason.CANCELLED) -> None:
        """Ends a sequence if it has not ended yet. Its blocks are free once the steps that name it have returned."""
        sequence = self.state.sequences.get(key)
        if sequence is not None:
            self.state.end(sequence, reason)

    def grammar_prepared(self, grammar_id: bytes, failure: Failure | None = None) -> None:
        """The worker has a grammar, or, if there is a `failure`, cannot have it."""
        for sequence in self.grammars.done(grammar_id, failed=failure is not None):
            if failure is None:
                self.state.queue.enqueue(sequence, after=self.grammars)
            else:
                self.state.end(sequence, Reason.ERROR, failure=failure)

    def transferred(self, transfer_id: int, *, failed: bool = False, lost: Collection[int] = ()) -> None:
        """The worker is done with a transfer, or could not do it. `lost`: blocks that the disk did not take or give."""
        assert self.host_blocks is not None, "it was ordered"
        self.state.queue.resume(self.host_blocks.done(transfer_id, failed=failed, lost=lost))

    def fetched(self, fetch_id: int, *, failed: bool = False) -> None:
        """The worker has blocks of another one, or could not get them."""
        assert self.peer_blocks is not None, "it was ordered"
        self.state.queue.resume(self.peer_blocks.done(fetch_id, failed=failed))

    def resume(self, sequences: list[Sequence]) -> None:
        """Lets sequences run that need not wait for blocks of other workers any longer."""
        self.state.queue.resume(sequences)

    # The two verbs.

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None while there is nothing to do or enough under way. `now`: seconds, any fixed origin."""
        self.expire(now)
        if len(self.flights) >= self.depth.most or now < self.next_at:
            return None
        if self.speculation.waits_for(self.flights):
            return None
        builder = self._build_one(now)
        while builder.num_tokens == 0 and builder.short_of_blocks and not self.flights:
            builder = self._build_one(now)  # each round preempted somebody and freed blocks at once
        return self._commit(builder, now) if builder.num_tokens else None

    def apply(self, result: StepResult, now: float) -> None:
        """Takes in the oldest step under way. What came of it is in take_events()."""
        flight = self.flights.popleft()
        begun = self._begun(flight)
        self._step_times.learn(flight.num_tokens, now - begun)
        self._pace.learn(flight.num_tokens, len(flight.slots), now - begun)
        self._chunk_limit.learn(flight.num_prompt_tokens, flight.num_tokens - flight.num_prompt_tokens, now - begun)
        self.depth.learn(now - begun)
        self.speculation.learn(flight, result, now - begun)
        self._last_applied_at = now
        assert flight.step_id == result.step_id, f"step {flight.step_id} is due, not {result.step_id}"
        self.state.last_applied = flight.step_id
        self.kv.pass_fence(flight.step_id)
        self._results.apply(flight, result)
        if self.host_blocks is not None and not self.flights:
            self.host_blocks.store_filled()  # of those who have ended: there may be no step for a while

    def take_events(self) -> Events:
        events, self.state.events = self.state.events, Events()
        return events

    # What it knows.

    @property
    def next_at(self) -> float:
        """schedule() plans nothing before."""
        if len(self.flights) != self.depth.num_stages:
            return -math.inf
        flight = self.flights[0]
        return self.depth.next_at(self._begun(flight), self._step_times.expected(flight.num_tokens))

    @property
    def has_work(self) -> bool:
        return bool(self.state.sequences)

    @property
    def num_sequences(self) -> int:
        return len(self.state.sequences)

    @property
    def drafts_wanted(self) -> bool:
        """Whether somebody runs whom the worker drafts for."""
        return self._grower.drafts_wanted

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of those without a slot; one for each that will find its prompt computed."""
        return self.state.queue.num_tokens

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, whatever they wait for."""
        return self.state.queue.num_sequences

    def prompt_seconds(self, num_tokens: int) -> float:
        """How long computing so many tokens of a prompt takes; 0 while nothing is known."""
        return self._pace.seconds_for(num_tokens)

    @property
    def use(self) -> BlockUse:
        return self.kv.use

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to be computed before everybody who is here has their next one."""
        running = self.running
        rest = sum(int(running.num_tokens[slot] - running.num_computed[slot]) for slot in running.prefilling)
        return self.num_waiting_tokens + rest + len(running) - len(running.prefilling)

    def num_cached(self, sequence: Sequence) -> int:
        """Tokens of `sequence` that it would find computed here, on the device or below it."""
        start = self._entry.start(sequence)
        if self.host_blocks is None or start.match is None or sequence.skip_reading_prefix_cache:
            return start.num_cached
        num_found = len(start.whole) // self.kv.num_groups
        most = self._entry.most_read(sequence) - num_found
        behind = self.host_blocks.num_behind(sequence.block_hashes, start.whole, most)
        return max(start.num_cached, (num_found + behind) * self.limits.block_size)

    def find(self, key: int) -> Sequence | None:
        return self.state.sequences.get(key)

    def keys_of(self, owner: int) -> list[int]:
        return [key for key, sequence in self.state.sequences.items() if sequence.owner == owner]

    # Changes that are neither verb's own.

    def preempt(self, slot: int) -> list[int]:
        """Takes a running sequence's blocks; returns the slots that are free now."""
        return self.state.preempt(slot)

    def migrate_out(self, sequence: Sequence) -> None:
        """Gives up a running sequence, which another worker continues: what it has is free once the steps that name it
        have returned, and what they sample for it is dropped."""
        self.state.migrate_out(sequence)

    def has_room(self, num_tokens: int, num_kept: int) -> bool:
        """Whether a sequence with so many tokens, of which `num_kept` blocks are kept for it, would come in now."""
        missing = self.kv.blocks_for(num_tokens + 1) - num_kept + self.limits.watermark_blocks
        is_next = not self.waiting and self.running.num_free_slots > self.state.searches.num_reserved
        return is_next and missing <= self.kv.pool.num_free

    def evacuate(self, loss: Loss | None = None) -> list[Sequence]:
        """The worker is gone: every unfinished sequence, in order of arrival; the core forgets them. `loss`: it did not
        leave of its own will, and what ran may be the cause."""
        return self.state.evacuate(loss)

    def evacuate_waiting(self) -> list[Sequence]:
        """Those that hold no slot, in order of arrival; the core forgets them."""
        return self.state.evacuate_waiting()

    def expire(self, now: float) -> None:
        """Ends those whose deadline has passed, as schedule() does: for the time in which nothing is scheduled."""
        for sequence in self._deadlines.passed(now):
            failure = Failure("DEADLINE_EXCEEDED", f"deadline passed while {sequence.status.value}")
            self.state.end(sequence, Reason.DEADLINE, failure=failure)

    def reset_prefix_cache(self, preempt_running: bool = False) -> int | None:
        """Forgets all prefixes; returns the number of blocks, None if sequences run and may not be preempted.

        Only while no step and no transfer is under way.
        """
        if preempt_running:
            by_age = np.argsort(-self.running.order, kind="stable")
            for slot in by_age[: len(self.running)].tolist():
                if self.running.live[slot]:  # its search may have left with another beam
                    self.state.preempt(slot)
        if self.peer_blocks is not None:
            self.peer_blocks.let_all_go()
        if not self.kv.idle:
            return None
        self.queries.reset()
        in_host_memory = 0 if self.host_blocks is None else self.host_blocks.forget()
        return self.kv.reset() + in_host_memory

    def _build_one(self, now: float) -> PlanBuilder:
        """Of the micro-batches that have something to do, the one whose turn it is."""
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
        if self.kv.parts is not None:
            self.kv.parts.publish()
        self.state.tables.slide()
        builder = PlanBuilder(self.limits.max_num_batched_tokens, names_owners=self.speculation.enabled)
        builder.micro_batch = micro_batch
        searches = self.state.searches
        for_beams = searches.num_tokens_wanted if searches else 0
        builder.budget.left -= for_beams
        self._grower.advance_ready(builder)
        if self._chunk_limit.enabled and len(builder.ready) and not self.limits.whole_prompts:
            builder.budget.left = min(builder.budget.left, self._chunk_limit.num_tokens)
        self._grower.advance_prefills(builder)
        builder.budget.left += for_beams
        if searches:
            self._beams.carry_out(builder)
        self._admitter.admit(builder, now)
        if searches:
            self._beams.skip_waiting(builder)
        return builder

    def _begun(self, oldest: Flight) -> float:
        return max(oldest.planned_at, self._last_applied_at)

    def _commit(self, builder: PlanBuilder, now: float) -> StepPlan:
        step_id = self.state.last_ordered = next(self._step_ids)
        released = self.state.take_released()
        flight = builder.flight(step_id, self.running, now)
        self.flights.append(flight)
        self.waiting.charge_output(self.running, flight.slots)
        self.state.tables.cache_full_blocks()
        if self.host_blocks is not None:
            self.host_blocks.store_filled()
        finishing = builder.finishing
        if finishing:
            self.state.tables.cache_prompts(finishing)
            self.state.prompts_scheduled([self.running.sequence(slot) for slot in finishing])
        self.counts.steps += 1
        self.counts.scheduled_tokens += builder.num_tokens
        plan = builder.plan(step_id, released, self.speculation.news(builder.num_drafts))
        dropped = self.queries.take_dropped()
        return replace(plan, dropped_queries=dropped) if dropped else plan
