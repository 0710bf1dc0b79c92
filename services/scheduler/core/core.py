"""The scheduling of one worker: schedule() orders a step, apply() takes in what it did.

Several steps (timing/depth.py) are under way at a time, so schedule() works on the state as it will be once they are
done: every sampled token counts as known, though its value comes later.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core import policies
from services.scheduler.core.beam.beams import Beams
from services.scheduler.core.drafts.speculation import DraftCounts, Speculation
from services.scheduler.core.grammars import Grammars
from services.scheduler.core.limits import Limits
from services.scheduler.core.plan import Events, StepPlan, StepResult, finish
from services.scheduler.core.policies import Policy
from services.scheduler.core.running import Running
from services.scheduler.core.scheduling.admission import Admitter
from services.scheduler.core.scheduling.growth import Grower
from services.scheduler.core.scheduling.plan_builder import Flight, PlanBuilder
from services.scheduler.core.scheduling.results import ResultProcessor
from services.scheduler.core.scheduling.siblings import Siblings
from services.scheduler.core.sequence import Failure, Reason, Sequence, Status
from services.scheduler.core.timing.depth import Depth
from services.scheduler.core.timing.forecast import Forecast
from services.scheduler.core.timing.pace import Pace
from services.scheduler.core.timing.step_times import StepTimes
from services.scheduler.kv_cache.block_pool import BlockUse, Observer
from services.scheduler.kv_cache.kv_cache_manager import KVCacheManager

ANSWERED = frozenset({Reason.STOP, Reason.LENGTH, Reason.REPETITION})


@dataclass(slots=True)
class Counts:
    """Totals of a core's lifetime."""

    prompt_tokens: int = 0  # of sequences at their first admission
    cached_tokens: int = 0  # of these, found in the prefix cache
    resumed_tokens: int = 0  # of sequences admitted again, after a preemption or from a lost worker
    resumed_cached_tokens: int = 0  # of these, found in the prefix cache
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)


class Core:
    """Owns the sequences of one worker and all knowledge of its KV blocks."""

    def __init__(self, limits: Limits, counts: Counts | None = None, observer: Observer | None = None) -> None:
        self.limits = limits
        self.kv = KVCacheManager(
            limits.num_blocks,
            limits.block_size,
            limits.max_num_seqs,
            limits.enable_prefix_caching,
            observer=observer,
            prefix_grain=limits.prefix_grain,
        )
        self.running = Running(limits.max_num_seqs, limits.block_size)
        self.waiting: Policy = policies.make(limits.scheduling_policy, limits.tenant_weights, limits.priority_aging_s)
        self.grammars = Grammars()
        self.siblings = Siblings()
        self.forecast = Forecast()
        self.pace = Pace()
        self.depth = Depth(limits.max_steps_in_flight)
        self.step_times = StepTimes()
        self.speculation = Speculation(
            limits.num_speculative_tokens,
            fixed=limits.fixed_draft_length,
            counts=DraftCounts() if counts is None else counts.drafts,
        )
        self.num_waiting_tokens = 0
        self.counts = Counts() if counts is None else counts
        self.events = Events()
        self.flights: deque[Flight] = deque()
        self.suspects: set[int] = set()  # slots of suspect sequences that have no token yet
        self.last_applied = 0
        self._last_applied_at = -math.inf
        self._sequences: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, key); ended sequences drop out lazily
        self._released: list[int] = []  # slots the worker has not been told of yet
        self._orders = itertools.count()
        self._step_ids = itertools.count(1)
        self.grower = Grower(self)
        self.admitter = Admitter(self)
        self.beams = Beams(self)
        self._results = ResultProcessor(self)

    # What goes in.

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, if it need not wait for its grammar first; one that can never run here ends with an error
        at once."""
        self._sequences[sequence.key] = sequence
        sequence.max_total_tokens = min(sequence.max_total_tokens, self.limits.max_model_len)
        if sequence.search is not None:
            sequence.search.limit(sequence.max_total_tokens - sequence.num_prompt_tokens)
        sequence.fence = 0
        if sequence.order < 0:
            sequence.order = next(self._orders)
        self._count_waiting(sequence)
        if sequence.grammar_id and not self.grammars.join(sequence):
            sequence.status = Status.BLOCKED
        else:
            self._queue(sequence)
        if sequence.deadline < math.inf:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.key))
        refusal = self.limits.refusal(sequence.num_tokens, sequence.width)
        if refusal is not None:
            self.end(sequence, Reason.ERROR, failure=Failure("INVALID_ARGUMENT", refusal))

    def cancel(self, key: int, reason: Reason = Reason.CANCELLED) -> None:
        """Ends a sequence if it has not ended yet. Its blocks are free once the steps that name it have returned."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self.end(sequence, reason)

    def grammar_prepared(self, grammar_id: bytes, failure: Failure | None = None) -> None:
        """The worker has a grammar, or, if there is a `failure`, cannot have it."""
        if failure is None:
            for sequence in self.grammars.prepared(grammar_id):
                self._queue(sequence)
            return
        for sequence in self.grammars.failed(grammar_id):
            self.end(sequence, Reason.ERROR, failure=failure)

    # The two verbs.

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None while there is nothing to do or enough under way. `now`: seconds, any fixed origin."""
        self._expire(now)
        if len(self.flights) >= self.depth.most or now < self.next_at:
            return None
        if self.speculation.waits_for(self.flights):
            return None
        builder = self._build(now)
        while builder.num_tokens == 0 and builder.short_of_blocks and not self.flights:
            builder = self._build(now)  # each round preempted somebody and freed blocks at once
        return self._commit(builder, now) if builder.num_tokens else None

    def apply(self, result: StepResult, now: float) -> None:
        """Takes in the oldest step under way. What came of it is in take_events()."""
        flight = self.flights.popleft()
        begun = self._begun(flight)
        self.step_times.learn(flight.num_tokens, now - begun)
        self.pace.learn(flight.num_tokens, len(flight.slots), now - begun)
        self.depth.learn(now - begun)
        self.speculation.learn(flight, result, now - begun)
        self._last_applied_at = now
        assert flight.step_id == result.step_id, f"step {flight.step_id} is due, not {result.step_id}"
        self.last_applied = flight.step_id
        self.kv.pass_fence(flight.step_id)
        self._results.take_in(flight, result)

    def take_events(self) -> Events:
        events, self.events = self.events, Events()
        return events

    # What it knows.

    @property
    def next_at(self) -> float:
        """schedule() plans nothing before."""
        if len(self.flights) != 1:
            return -math.inf
        flight = self.flights[0]
        return self.depth.next_at(self._begun(flight), self.step_times.expected(flight.num_tokens))

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def drafts_wanted(self) -> bool:
        """Whether somebody runs whom the worker drafts for."""
        if not self.speculation.enabled:
            return False
        return not self.limits.drafts_constrained_only or self.running.num_constrained > 0

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, whatever they wait for."""
        return len(self.waiting) + self.grammars.num_blocked + self.siblings.num_parked

    @property
    def use(self) -> BlockUse:
        return self.kv.use

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to be computed before everybody who is here has their next one."""
        running = self.running
        rest = sum(int(running.num_tokens[slot] - running.num_computed[slot]) for slot in running.prefilling)
        return self.num_waiting_tokens + rest + len(running) - len(running.prefilling)

    def find(self, key: int) -> Sequence | None:
        return self._sequences.get(key)

    def keys_of(self, owner: int) -> list[int]:
        return [key for key, sequence in self._sequences.items() if sequence.owner == owner]

    # Changes that are neither verb's own.

    def end(
        self, sequence: Sequence, reason: Reason, stop_token_id: int | None = None, failure: Failure | None = None
    ) -> None:
        """Gives `sequence` its one terminal event and takes back what it holds."""
        self.forget(sequence, reason)
        self.events.finished += finish(sequence, reason, stop_token_id, failure)

    def forget(self, sequence: Sequence, reason: Reason) -> None:
        """It is over: what it holds is taken back."""
        if sequence.status is Status.RUNNING and sequence.search is not None:
            self.beams.leave(sequence)
        elif sequence.status is Status.RUNNING:
            if reason is not Reason.ERROR:
                self.grower.cache_partial_block(sequence.slot)
            self.take_slot(sequence)
            if reason in ANSWERED:
                self.forecast.learn(sequence.num_tokens - sequence.num_prompt_tokens)
        else:
            self._leave_queue(sequence)
            self.num_waiting_tokens -= sequence.num_queued_tokens
        if sequence.grammar_id:
            self.grammars.leave(sequence)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.key]
        heir = self.siblings.ended(sequence)
        if heir is not None:  # it computes the prompt now
            self.num_waiting_tokens -= heir.num_queued_tokens
            self._count_waiting(heir)
            self._queue(heir)

    def preempt(self, slot: int) -> list[int]:
        """Takes a running sequence's blocks; all is computed again, less what the cache then holds. With a beam its
        whole search goes. Returns the slots that are free now."""
        sequence = self.beams.root_of(int(self.running.keys[slot])) or self.running.sequence(slot)
        slots = [slot]
        if sequence.search is not None:
            slots = self.beams.slots_of(sequence)
            sequence.fence = self.beams.leave(sequence)
        else:
            self.grower.cache_partial_block(slot)
            sequence.fence = self.take_slot(sequence) or 0
        sequence.status = Status.PREEMPTED
        sequence.num_preemptions += 1
        self.counts.preemptions += 1
        self.waiting.push_back(sequence)
        self._count_waiting(sequence)
        return slots

    def extend(self, slot: int, token: int) -> None:
        """The next token of `slot` is known."""
        self._results.hash(self.running.append(np.array([slot]), np.array([token], dtype=np.int32)))

    def next_waiting(self) -> Sequence:
        """Takes the head of the queue."""
        sequence = self.waiting.pop()
        self.num_waiting_tokens -= sequence.num_queued_tokens
        return sequence

    def take_slot(self, sequence: Sequence) -> int | None:
        """Frees slot and blocks; returns the step to wait for, None if none under way names the slot."""
        slot = sequence.slot
        fence = self.flights[-1].step_id if self.flights else None
        self.suspects.discard(slot)
        self.running.leave(slot)
        self.siblings.left(sequence, slot)
        self.kv.release(slot, fence)
        self._released.append(slot)
        return fence

    def evacuate(self, *, lost: bool = False) -> list[Sequence]:
        """The worker is gone: every unfinished sequence, as it was last known, in order of arrival. `lost`: it did not
        leave of its own will, and what ran may be the cause."""
        for slot in np.flatnonzero(self.running.live).tolist():
            progressed = self.running.has_progressed(self.running.sequence(slot))
            sequence = self.running.leave(slot)
            self.siblings.left(sequence, slot)
            if lost:
                sequence.num_losses = 1 if progressed else sequence.num_losses + 1
            if not sequence.is_beam:
                sequence.status = Status.WAITING
                self.waiting.push(sequence)
        for root in self.beams.abandon():
            root.status = Status.WAITING
            root.num_losses += lost
            self.waiting.push(root)
        self.flights.clear()
        return self.evacuate_waiting()

    def evacuate_waiting(self) -> list[Sequence]:
        """Those that hold no slot, in order of arrival; the core forgets them."""
        blocked = [*self.grammars.blocked(), *self.siblings.parked()]
        sequences = sorted([*self.waiting, *blocked], key=lambda s: s.order)
        for sequence in sequences:
            self._leave_queue(sequence)
            if sequence.grammar_id:
                self.grammars.leave(sequence)
            self.siblings.ended(sequence)
            del self._sequences[sequence.key]
            sequence.order = -1
            sequence.status = Status.WAITING
        self.num_waiting_tokens = 0
        return sequences

    def reset_prefix_cache(self, preempt_running: bool = False) -> int | None:
        """Forgets all prefixes; returns the number of blocks, None if sequences run and may not be preempted.

        Only while no step is under way.
        """
        if preempt_running:
            by_age = np.argsort(-self.running.order, kind="stable")
            for slot in by_age[: len(self.running)].tolist():
                if self.running.live[slot]:  # its search may have left with another beam
                    self.preempt(slot)
        return self.kv.reset() if self.kv.idle else None

    def _queue(self, sequence: Sequence) -> None:
        if self.siblings.parks(sequence):
            sequence.status = Status.BLOCKED
            self.num_waiting_tokens -= sequence.num_queued_tokens - 1  # the last one of its prompt
            sequence.num_queued_tokens = 1
            return
        sequence.status = Status.WAITING
        self.waiting.push(sequence)

    def _leave_queue(self, sequence: Sequence) -> None:
        if sequence.status is Status.BLOCKED:
            self.siblings.unpark(sequence)
        else:
            self.waiting.remove(sequence)

    def _count_waiting(self, sequence: Sequence) -> None:
        sequence.num_queued_tokens = sequence.num_tokens
        self.num_waiting_tokens += sequence.num_queued_tokens

    def _build(self, now: float) -> PlanBuilder:
        if self.kv.parts is not None:
            self.kv.parts.publish()
        builder = PlanBuilder(self.limits.max_num_batched_tokens, names_owners=self.speculation.enabled)
        for_beams = self.beams.num_tokens_wanted if self.beams else 0
        builder.budget.left -= for_beams
        self.grower.advance_ready(builder)
        self.grower.advance_prefills(builder)
        builder.budget.left += for_beams
        if self.beams:
            self.beams.carry_out(builder)
        self.admitter.admit(builder, now)
        if self.beams:
            self.beams.hold(builder)
        return builder

    def _free_siblings(self, slots: list[int]) -> None:
        """Who waited for the prompts that are computed once the step that is being planned has run comes next."""
        freed = self.siblings.computed(slots, map(self.running.sequence, slots))
        for sibling in reversed(freed):
            sibling.status = Status.WAITING
            self.waiting.push_back(sibling)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(key)
            if sequence is not None:
                failure = Failure("DEADLINE_EXCEEDED", f"deadline passed while {sequence.status.value}")
                self.end(sequence, Reason.DEADLINE, failure=failure)

    def _begun(self, oldest: Flight) -> float:
        return max(oldest.planned_at, self._last_applied_at)

    def _commit(self, builder: PlanBuilder, now: float) -> StepPlan:
        step_id = next(self._step_ids)
        released, self._released = sorted(self._released), []
        flight = builder.flight(step_id, self.running, now)
        self.flights.append(flight)
        self.waiting.charge_output(self.running, flight.slots)
        self.grower.cache_full_blocks()
        finishing = builder.finishing
        if finishing:
            self.grower.cache_prompts(finishing)
            self._free_siblings(finishing)
        self.counts.steps += 1
        self.counts.scheduled_tokens += builder.num_tokens
        return builder.plan(step_id, released, self.speculation.news(builder.num_drafts))
