"""All sequences of a core, and the transitions between their states: waiting, running, finished.

The parts of schedule() and apply() (scheduling/, beam/) decide; their decisions are carried out here, in waiting.py and
in tables.py, which know none of those parts.
"""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np

from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import Events, finished_events
from quire.services.scheduler.core.policies import Policy
from quire.services.scheduler.core.running.searches import RunningSearches
from quire.services.scheduler.core.sequences.ending import ANSWERED, Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus, WorkerLoss
from quire.services.scheduler.core.step.plan_builder import InFlightStep
from quire.services.scheduler.core.tables import SlotTables
from quire.services.scheduler.core.timing.forecast import Forecast
from quire.services.scheduler.core.waiting import WaitingSequences
from quire.services.scheduler.kv_cache.block_pool import Observer


class CoreState:
    """Owns every sequence of one worker's core. Prerequisites are a list; the state does not depend on their kinds."""

    def __init__(self, limits: CoreLimits, counts: CoreCounts, observer: Observer | None) -> None:
        self.limits = limits
        self.counts = counts
        self.tables = SlotTables(limits, observer)
        self.kv, self.running = self.tables.kv, self.tables.running
        self.queue = WaitingSequences(limits.policy(limits.policy_options))
        self.waiting: Policy = self.queue.policy
        self.searches = RunningSearches()
        self.forecast = Forecast()
        self.events = Events()
        self.steps_in_flight: deque[InFlightStep] = deque()
        self.last_applied = self.last_ordered = 0  # ids of steps
        self.suspects: set[int] = set()  # slots of suspects without a token so far
        self.sequences: dict[int, Sequence] = {}  # unfinished sequences by key
        self.released: list[int] = []  # released slots that no plan has named yet
        self._orders = itertools.count()

    # Submission.

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, or blocks it until its prerequisites are ready. If this raises, nothing of it is left."""
        sequence.num_queued_tokens = sequence.fence = 0
        try:
            self.submit(sequence)
        except Exception:
            self.queue.undo_enqueue(sequence)
            self.sequences.pop(sequence.key, None)
            raise

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence, client's or internal, and gives it an order of arrival if it has none. Prerequisites
        submit internal sequences with it, which no client sees."""
        self.sequences[sequence.key] = sequence
        if sequence.order < 0:
            sequence.order = next(self._orders)
        self.queue.enqueue(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Removes an internal sequence, whatever its state, and frees its slot and blocks; does nothing if it does
        not exist."""
        if sequence.status is SequenceStatus.RUNNING:
            self.release(sequence, Reason.CANCELLED)
        else:
            self.queue.undo_enqueue(sequence)
            self.sequences.pop(sequence.key, None)

    # Prerequisites.

    def finish_internal(self, sequence: Sequence, failure: Failure | None = None) -> None:
        """Applies the result of an internal sequence; with a `failure`, the sequences that depend on it finish with
        it."""
        failed = failure is not None
        results = [each.on_computed(sequence, failed=failed) for each in self.queue.prerequisites]
        self.release(sequence, Reason.ERROR if failed else Reason.STOP)
        for dependent in itertools.chain.from_iterable(results):
            self.finish(dependent, Reason.ERROR, failure=failure)

    # Running.

    def release_slot(self, sequence: Sequence) -> int | None:
        """Frees the slot and blocks of a running sequence and lists the slot for the next plan. Returns the id of
        the last step in flight, after which the blocks are free, or None if no step is in flight."""
        fence = self.steps_in_flight[-1].step_id if self.steps_in_flight else None
        self.queue.release_slot(sequence)
        slot = self.tables.release(sequence, fence)
        self.suspects.discard(slot)
        self.released.append(slot)
        return fence

    def take_released(self) -> list[int]:
        """Returns and clears the slots that the next plan has to name as free, ascending."""
        released, self.released = sorted(self.released), []
        return released

    def preempt(self, slot: int) -> list[int]:
        """Preempts a running sequence: its tokens are computed again, except for what is still cached then. A beam
        takes its whole search with it. Returns the slots that are free now."""
        sequence = self.searches.root_of(int(self.running.keys[slot])) or self.running.sequence(slot)
        slots = [slot]
        if sequence.search is not None:
            slots = self.searches.slots_of(sequence)
            sequence.fence = self._release_search(sequence)
        else:
            self.tables.cache_partial_block(slot)
            sequence.fence = self.release_slot(sequence) or 0
        sequence.num_preemptions += 1
        self.counts.preemptions += 1
        self.queue.requeue(sequence)
        return slots

    # End and migration.

    def finish(
        self, sequence: Sequence, reason: Reason, stop_token_id: int | None = None, failure: Failure | None = None
    ) -> None:
        """Finishes a sequence, whatever its state: releases its slot, blocks and prerequisites and emits one
        terminal event for each of its outputs."""
        self.release(sequence, reason)
        self.events.finished += finished_events(sequence, reason, stop_token_id, failure)

    def release(self, sequence: Sequence, reason: Reason) -> None:
        """Releases the sequence's slot, blocks and prerequisites; emits no event."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence, reason)
            self.queue.release_prerequisites(sequence)
        else:
            self.queue.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self.sequences[sequence.key]

    def migrate_out(self, sequence: Sequence) -> None:
        """Removes a running sequence that another worker continues: frees its slot, leaves its prerequisites and
        emits no event; its last, partial block stays in the prefix cache. Raises AssertionError for beams."""
        assert sequence.status is SequenceStatus.RUNNING, "it holds a slot"
        assert not sequence.is_beam, "beams stay together"
        self.tables.cache_partial_block(sequence.slot)
        self.release_slot(sequence)
        self.queue.release_prerequisites(sequence)
        self._detach(sequence)

    def evacuate(self, loss: WorkerLoss | None) -> list[Sequence]:
        """Removes every unfinished sequence of a worker that is gone, in its last known state; returns them in order of
        arrival. `loss`: set if the worker did not leave on its own; the sequences that ran are suspects."""
        for slot in np.flatnonzero(self.running.live).tolist():
            sequence = self.running.sequence(slot)
            progressed = self.running.has_progressed(sequence)
            self.queue.release_slot(sequence)
            self.running.release(slot)
            if loss is not None:
                sequence.losses = (loss,) if progressed else (*sequence.losses, loss)
            if sequence.is_query:
                self._drop_internal(sequence, loss)
            elif not sequence.is_beam:
                sequence.status = SequenceStatus.WAITING
                self.waiting.push(sequence)
        for root in self.searches.clear():
            root.status = SequenceStatus.WAITING
            root.losses += () if loss is None else (loss,)
            self.waiting.push(root)
        self.steps_in_flight.clear()
        return self.evacuate_waiting()

    def evacuate_waiting(self) -> list[Sequence]:
        """Removes and returns the sequences without a slot, in order of arrival. Internal sequences are dropped; the
        sequences that need them submit them again elsewhere."""
        sequences = [*self.queue.blocked(), *(sequence for sequence in self.waiting if not sequence.is_query)]
        for sequence in sequences:
            self.queue.remove(sequence)
        sequences.sort(key=lambda sequence: sequence.order)
        for sequence in sequences:
            self._detach(sequence)
        self.queue.num_tokens = 0
        return sequences

    def _detach(self, sequence: Sequence) -> None:
        del self.sequences[sequence.key]
        sequence.order = -1
        sequence.status = SequenceStatus.WAITING

    def _drop_internal(self, sequence: Sequence, loss: WorkerLoss | None) -> None:
        """Drops an internal sequence of a worker that is gone. Its dependents count the loss, because they caused what
        it computed."""
        for prerequisite in self.queue.prerequisites:
            for dependent in prerequisite.dependents(sequence):
                dependent.losses += () if loss is None else (loss,)
        sequence.status = SequenceStatus.FINISHED
        del self.sequences[sequence.key]

    def _stop_running(self, sequence: Sequence, reason: Reason) -> None:
        """Frees the slot of a sequence, or the slots of a whole search. Its partial block is cached unless it
        failed; the length of a complete answer enters the forecast."""
        if sequence.search is not None:
            self._release_search(sequence)
            return
        if reason is not Reason.ERROR:
            self.tables.cache_partial_block(sequence.slot)
        self.release_slot(sequence)
        if reason in ANSWERED and not sequence.samples_nothing:
            self.forecast.observe(sequence.num_tokens - sequence.num_prompt_tokens)

    def _release_search(self, root: Sequence) -> int:
        """Frees all slots of a search; returns the id of the step to wait for before it may run again, 0 if there is
        none."""
        return max(self.release_slot(beam.sequence) or 0 for beam in self.searches.remove(root))
