"""All sequences of a core, and the verbs that change where one of them is: queued, running, parked, over.

schedule() and apply() consist of parts that decide (scheduling/, beam/); whatever they decide is done here or in
tables.py, and these know none of them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Blocks

import numpy as np

from quire.services.scheduler.core.counts import Counts
from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import Events, finish
from quire.services.scheduler.core.policies import Policy
from quire.services.scheduler.core.prerequisites.grammars import Grammars
from quire.services.scheduler.core.prerequisites.host_blocks import Transfers
from quire.services.scheduler.core.prerequisites.late_queries import WorkerQueries
from quire.services.scheduler.core.prerequisites.peer_blocks import Fetches
from quire.services.scheduler.core.prerequisites.siblings import Siblings
from quire.services.scheduler.core.running.searches import Searches
from quire.services.scheduler.core.sequences.ending import ANSWERED, Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Loss, Sequence, SequenceStatus
from quire.services.scheduler.core.step.plan_builder import Flight, PlanBuilder
from quire.services.scheduler.core.tables import Tables
from quire.services.scheduler.core.timing.forecast import Forecast
from quire.services.scheduler.kv_cache.block_pool import Observer
from quire.shared.kv import block_hash


class CoreState:
    """The one owner of it."""

    def __init__(self, limits: CoreLimits, counts: Counts, observer: Observer | None) -> None:
        self.limits = limits
        self.counts = counts
        self.tables = Tables(limits, observer)
        self.kv, self.running = self.tables.kv, self.tables.running
        self.waiting: Policy = limits.policy(limits.policy_options)
        self.grammars = Grammars()
        self.queries = WorkerQueries(limits.num_query_vectors)
        self.siblings = Siblings()
        self.searches = Searches()
        self.forecast = Forecast()
        moves = limits.tiers.num_host_blocks and limits.caches_prefixes
        self.transfers = Transfers(self.kv, limits.tiers, counts) if moves else None
        shares = limits.caches_prefixes and self.kv.groups.plain
        self.fetches = Fetches(self.kv, counts, lambda: self.last_ordered) if shares else None
        self.events = Events()
        self.flights: deque[Flight] = deque()
        self.last_applied = self.last_ordered = 0  # steps
        self.suspects: set[int] = set()  # slots of suspect sequences that have no token yet
        self.sequences: dict[int, Sequence] = {}
        self.num_waiting_tokens = 0
        self._released: list[int] = []  # slots the worker has not been told of yet
        self._orders = itertools.count()

    # Coming, waiting, being next.

    def add(self, sequence: Sequence) -> None:
        """Queues it, unless it waits for its grammar or its query. If it raises, nothing is left of it here."""
        sequence.num_queued_tokens = sequence.fence = 0
        try:
            self._take_in(sequence)
        except Exception:
            self._drop(sequence)
            raise

    def refuse(self, sequence: Sequence, failure: Failure) -> None:
        """It ends before it comes in."""
        sequence.status = SequenceStatus.FINISHED
        self.events.finished += finish(sequence, Reason.ERROR, failure=failure)

    def _take_in(self, sequence: Sequence) -> None:
        self.sequences[sequence.key] = sequence
        if sequence.order < 0:
            sequence.order = next(self._orders)
        self._count_waiting(sequence)
        if sequence.grammar_id and not self.grammars.join(sequence):
            sequence.status = SequenceStatus.BLOCKED
        elif sequence.query is not None and not self._join_query(sequence):
            sequence.status = SequenceStatus.BLOCKED
            self._begin_queries()
            self._hurry_query(sequence)
        else:
            self.queue(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Undoes _take_in(), however far it came."""
        self.num_waiting_tokens -= sequence.num_queued_tokens
        if any(waiting is sequence for waiting in self.waiting):
            self.waiting.remove(sequence)
        if sequence.grammar_id:
            self.grammars.leave(sequence)
        if sequence.query is not None:
            self._leave_query(sequence)
        self.sequences.pop(sequence.key, None)
        self._hand_on(sequence)

    def queue(self, sequence: Sequence) -> None:
        """Lets it wait for a slot, or for the sibling that computes its prompt."""
        if self.siblings.parks(sequence):
            sequence.status = SequenceStatus.BLOCKED
            self.num_waiting_tokens -= sequence.num_queued_tokens - 1  # the last one of its prompt
            sequence.num_queued_tokens = 1
            return
        sequence.status = SequenceStatus.WAITING
        self.waiting.push(sequence)

    @property
    def brings_blocks(self) -> bool:
        """From host memory or from other workers."""
        return self.transfers is not None or (self.fetches is not None and self.fetches.neighbours is not None)

    def block_on_transfer(self, sequence: Sequence, found: Blocks[int], most: int) -> bool:
        """The head of the queue waits for blocks from host memory or another worker, if they are worth it. Whether it
        does."""
        if not any(
            moves is not None and moves.fetch(sequence, found, most) for moves in (self.transfers, self.fetches)
        ):
            return False
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.BLOCKED
        return True

    def end_transfer(self, transfer_id: int, *, failed: bool, lost: Collection[int]) -> None:
        """Who waited for it comes next."""
        assert self.transfers is not None, "it was ordered"
        self.unblock(self.transfers.done(transfer_id, failed=failed, lost=lost))

    def unblock(self, sequences: list[Sequence]) -> None:
        """They come next."""
        for sequence in reversed(sequences):
            sequence.status = SequenceStatus.WAITING
            self.waiting.push_back(sequence)

    def next_waiting(self) -> Sequence:
        """Takes the head of the queue."""
        sequence = self.waiting.pop()
        self.num_waiting_tokens -= sequence.num_queued_tokens
        return sequence

    def free_siblings(self, slots: list[int]) -> None:
        """Who waited for the prompts that are computed once the step that is being planned has run comes next."""
        freed = self.siblings.computed(slots, map(self.running.sequence, slots))
        self.unblock(freed)

    # Queries, and the documents that are compared with them.

    def free_documents(self, sequences: Iterable[Sequence]) -> None:
        """The step that is being planned computes the last of these: who waited for a query among them comes next."""
        for sequence in sequences:
            if sequence.is_query:
                self.unblock(self.queries.ordered(sequence))

    def query_computed(self, sequence: Sequence) -> None:
        self.queries.computed(sequence)
        self.forget(sequence, Reason.STOP)

    def query_failed(self, sequence: Sequence, failure: Failure) -> None:
        """Its documents end with the same."""
        documents = self.queries.failed(sequence)
        self.forget(sequence, Reason.ERROR)
        for document in documents:
            self.end(document, Reason.ERROR, failure=failure)
        self._begin_queries()

    def forget_queries(self) -> None:
        """The worker has none any more; nothing runs."""
        for document in self.queries.forget():
            if document.status is not SequenceStatus.BLOCKED:
                self.waiting.remove(document)
                document.status = SequenceStatus.BLOCKED
        self._begin_queries()

    def _lose_query(self, sequence: Sequence, loss: Loss | None) -> None:
        """The worker is gone that computed it, and what it may have died of is what its documents ask for."""
        for document in self.queries.waiting_for(sequence):
            document.losses += () if loss is None else (loss,)
        sequence.status = SequenceStatus.FINISHED
        del self.sequences[sequence.key]

    def _begin_queries(self) -> None:
        for sequence in self.queries.take_begun():
            if self.limits.caches_prefixes:
                hashes = block_hash.chain(sequence.root_hash, bytes(sequence.tokens), self.limits.block_size)
                sequence.block_hashes = list(hashes)
            self.sequences[sequence.key] = sequence
            self._count_waiting(sequence)
            self.queue(sequence)

    def _join_query(self, document: Sequence) -> bool:
        """Whether it can run."""
        found = self.queries.join(document)
        self.counts.compared_documents += 1
        self.counts.query_hits += found
        return found

    def _hurry_query(self, document: Sequence) -> None:
        """What computes its query is as urgent as the most urgent that waits for it."""
        query = self.queries.computing(document)
        if query is None or query.priority <= document.priority:
            return
        query.priority = document.priority
        if query.status is SequenceStatus.WAITING:
            self.waiting.remove(query)
            self.waiting.push(query)

    def _leave_query(self, sequence: Sequence) -> None:
        """A document goes; what computes a query for it alone goes as well."""
        if not sequence.is_query:
            unwanted = self.queries.leave(sequence)
            if unwanted is not None and unwanted.status is SequenceStatus.RUNNING:
                self.forget(unwanted, Reason.CANCELLED)
            elif unwanted is not None:
                self._drop(unwanted)
            self._begin_queries()

    # Running.

    def chunk_size(self, builder: PlanBuilder, num_remaining: int) -> int:
        """Tokens of a prompt to compute now, taken from the budget."""
        threshold = self.limits.long_prefill_token_threshold
        alone = len(self.sequences) == 1
        at_most = num_remaining if threshold == 0 or alone or self.limits.whole_prompts else threshold
        return builder.budget.try_add(num_remaining, at_most)

    def take_slot(self, sequence: Sequence) -> int | None:
        """Frees slot and blocks; returns the step to wait for, None if none under way names the slot."""
        fence = self.flights[-1].step_id if self.flights else None
        if self.transfers is not None:
            self.transfers.stop(sequence)
        slot = self.tables.leave(sequence, fence)
        self.suspects.discard(slot)
        self.siblings.left(sequence, slot)
        self._released.append(slot)
        return fence

    def take_released(self) -> list[int]:
        """Slots that a plan has to name as free, ascending."""
        released, self._released = sorted(self._released), []
        return released

    def preempt(self, slot: int) -> list[int]:
        """Takes a running sequence's blocks; all is computed again, less what the cache then holds. With a beam its
        whole search goes. Returns the slots that are free now."""
        sequence = self.searches.root_of(int(self.running.keys[slot])) or self.running.sequence(slot)
        slots = [slot]
        if sequence.search is not None:
            slots = self.searches.slots_of(sequence)
            sequence.fence = self._leave_search(sequence)
        else:
            self.tables.cache_partial_block(slot)
            sequence.fence = self.take_slot(sequence) or 0
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self.counts.preemptions += 1
        self.waiting.push_back(sequence)
        self._count_waiting(sequence)
        return slots

    def make_room(self, builder: PlanBuilder) -> None:
        """Preempts a sequence, which may be the one in need, unless blocks are about to come back anyway."""
        builder.short_of_blocks = True
        if self.kv.num_fenced:
            return
        victim = self.waiting.victim(self.running)
        if not builder.moves(victim):  # beams that have just moved must stay
            for slot in self.preempt(victim):
                builder.drop(slot)

    # Being over.

    def end(
        self, sequence: Sequence, reason: Reason, stop_token_id: int | None = None, failure: Failure | None = None
    ) -> None:
        """Gives `sequence` its one terminal event and takes back what it holds."""
        self.forget(sequence, reason)
        self.events.finished += finish(sequence, reason, stop_token_id, failure)

    def forget(self, sequence: Sequence, reason: Reason) -> None:
        """It is over: what it holds is taken back."""
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_running(sequence, reason)
        else:
            self._leave_queue(sequence)
            self.num_waiting_tokens -= sequence.num_queued_tokens
        if sequence.grammar_id:
            self.grammars.leave(sequence)
        if sequence.query is not None:
            self._leave_query(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self.sequences[sequence.key]
        self._hand_on(sequence)

    def _hand_on(self, sequence: Sequence) -> None:
        """Its prompt is for a sibling to compute, if one waited for it."""
        heir = self.siblings.ended(sequence)
        if heir is not None:  # it computes the prompt now
            self.num_waiting_tokens -= heir.num_queued_tokens
            self._count_waiting(heir)
            self.queue(heir)

    def part_with(self, sequence: Sequence) -> None:
        """It goes on at another worker."""
        assert sequence.status is SequenceStatus.RUNNING, "it holds a slot"
        assert not sequence.is_beam, "beams stay together"
        self.tables.cache_partial_block(sequence.slot)
        self.take_slot(sequence)
        if sequence.grammar_id:
            self.grammars.leave(sequence)
        del self.sequences[sequence.key]
        sequence.order = -1
        sequence.status = SequenceStatus.WAITING

    def evacuate(self, loss: Loss | None) -> list[Sequence]:
        """The worker is gone: every unfinished sequence, as it was last known, in order of arrival. `loss`: it did not
        leave of its own will, and what ran may be the cause."""
        for slot in np.flatnonzero(self.running.live).tolist():
            progressed = self.running.has_progressed(self.running.sequence(slot))
            sequence = self.running.leave(slot)
            self.siblings.left(sequence, slot)
            if loss is not None:
                sequence.losses = (loss,) if progressed else (*sequence.losses, loss)
            if sequence.is_query:
                self._lose_query(sequence, loss)
            elif not sequence.is_beam:
                sequence.status = SequenceStatus.WAITING
                self.waiting.push(sequence)
        for root in self.searches.abandon():
            root.status = SequenceStatus.WAITING
            root.losses += () if loss is None else (loss,)
            self.waiting.push(root)
        self.flights.clear()
        return self.evacuate_waiting()

    def evacuate_waiting(self) -> list[Sequence]:
        """Those that hold no slot, in order of arrival; they are forgotten here."""
        moving = () if self.transfers is None else self.transfers.blocked()
        coming = () if self.fetches is None else self.fetches.blocked()
        blocked = [*self.grammars.blocked(), *self.queries.blocked(), *self.siblings.parked(), *moving, *coming]
        waiting = [sequence for sequence in self.waiting if not sequence.is_query]  # those go with their documents
        sequences = sorted([*waiting, *blocked], key=lambda s: s.order)
        for sequence in sequences:
            self._leave_queue(sequence)
            if sequence.grammar_id:
                self.grammars.leave(sequence)
            if sequence.query is not None:
                self._leave_query(sequence)
            self.siblings.ended(sequence)
            del self.sequences[sequence.key]
            sequence.order = -1
            sequence.status = SequenceStatus.WAITING
        self.num_waiting_tokens = 0
        return sequences

    def _leave_running(self, sequence: Sequence, reason: Reason) -> None:
        if sequence.search is not None:
            self._leave_search(sequence)
            return
        if reason is not Reason.ERROR:
            self.tables.cache_partial_block(sequence.slot)
        self.take_slot(sequence)
        if reason in ANSWERED and not sequence.samples_nothing:
            self.forecast.learn(sequence.num_tokens - sequence.num_prompt_tokens)

    def _leave_search(self, root: Sequence) -> int:
        """Takes all slots of the search; returns the step to wait for before it may run again, 0 if there is none."""
        return max(self.take_slot(beam.sequence) or 0 for beam in self.searches.leave(root))

    def _leave_queue(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.BLOCKED:
            self.siblings.unpark(sequence)
            if self.transfers is not None:
                self.transfers.leave(sequence)
            if self.fetches is not None:
                self.fetches.leave(sequence)
        else:
            self.waiting.remove(sequence)

    def _count_waiting(self, sequence: Sequence) -> None:
        sequence.num_queued_tokens = sequence.num_tokens
        self.num_waiting_tokens += sequence.num_queued_tokens
