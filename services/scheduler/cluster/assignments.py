"""Which worker each sequence is with, and how it gets from one to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.services.scheduler.cluster.adapters import Adapters
from quire.services.scheduler.cluster.request_traces import RequestTraces
from quire.services.scheduler.cluster.terms import ClusterTerms
from quire.services.scheduler.cluster.unassigned import UnassignedSequences
from quire.services.scheduler.core.plan import Events, finish
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Loss, Sequence
from quire.services.scheduler.frontends.submissions import complete
from quire.services.scheduler.placement.handovers import Handovers
from quire.services.scheduler.placement.neighbourhood import Neighbourhood
from quire.services.scheduler.placement.placement import Placement
from quire.services.scheduler.replicas.replica import Clock, Replica
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.models.adapter_contents import AdapterId
from quire.shared.settings import SchedulerSettings

log = logger("assignments")


class Assignments:
    """A sequence is with a worker or unassigned, until it ends."""

    def __init__(
        self,
        settings: SchedulerSettings,
        clock: Clock,
        metrics: SchedulerMetrics,
        *,
        replicas: Mapping[str, Replica],
        terms: ClusterTerms,
        adapters: Adapters,
        traces: RequestTraces,
        deliver: Callable[[Events], None],
    ) -> None:
        """`replicas`: by id, kept up to date by the owner; `deliver` is told of sequences that end here."""
        self._settings, self._clock, self._metrics = settings, clock, metrics
        self._replicas, self._terms, self._adapters = replicas, terms, adapters
        self._traces, self._deliver = traces, deliver
        self.unassigned = UnassignedSequences()
        self.parking = False  # what comes stays unassigned, so that workers run empty
        self.num_moved = 0  # sequences, from worker to worker or back to the queue
        self._replica_of: dict[int, Replica] = {}  # key -> replica, for those that are assigned
        self.neighbourhood = Neighbourhood(replicas, settings.kv_handover)
        placement = Placement(settings.placement, self.neighbourhood.fetchable)
        threshold = settings.prefill_threshold
        self.handovers = Handovers(self.neighbourhood, placement, threshold, metrics, self._hand_over)

    # Sequences.

    def assign(self, sequence: Sequence, *, parking: bool) -> None:
        """`parking`: it came while what comes was parked."""
        if parking and self.parking and not sequence.has_begun:  # parking may have ended meanwhile
            self.unassigned.add(sequence)
        else:
            self.place(sequence)

    def cancel(self, sequence: Sequence, reason: Reason) -> None:
        replica = self._replica_of.get(sequence.key)
        if replica is None:
            self._end_unassigned(sequence, reason)
        else:
            replica.cancel(sequence.key, reason)

    def drop(self, sequence: Sequence) -> None:
        """Wherever it is; nobody is told."""
        replica = self._replica_of.pop(sequence.key, None)
        if replica is not None:
            replica.core.cancel(sequence.key)
        elif sequence.key in self.unassigned:
            self.unassigned.remove(sequence.key)

    def ended(self, key: int) -> None:
        """A worker has told so, or nobody had it."""
        self._replica_of.pop(key, None)

    def replica_of(self, key: int) -> Replica | None:
        """None for a sequence that is unassigned."""
        return self._replica_of.get(key)

    @property
    def num_placed(self) -> int:
        """Sequences that workers have."""
        return len(self._replica_of)

    @property
    def idle(self) -> bool:
        return not self.unassigned and not self._replica_of

    # Workers.

    def attached(self, replica: Replica) -> None:
        replica.watch(self.handovers.pumped)
        self._workers_changed()

    def detached(self, gone: Replica, loss: Loss | None) -> int:
        """Its sequences go on elsewhere, or wait. Returns how many those are. `loss`: it did not leave of its own
        will."""
        self.handovers.detached(gone)
        self.neighbourhood.detached(gone)
        self._workers_changed()
        moved = gone.core.evacuate(loss)
        self._move(moved, gone.last_step_at)
        return len(moved)

    def _workers_changed(self) -> None:
        self.neighbourhood.changed()
        self.handovers.changed(self._replicas.values())

    def give_back(self, replica: Replica) -> None:
        """Those that hold no slot there go on elsewhere, or wait."""
        self._move(replica.core.evacuate_waiting(), replica.last_step_at)

    def came_back(self) -> None:
        """Workers take sequences again, or have other weights."""
        self.neighbourhood.changed()
        self.place_unassigned()

    # The unassigned.

    def park(self, parking: bool) -> None:
        """Keeps what comes from the workers, which go on with what they have, or gives it to them."""
        were_parked = self.parking and not parking
        self.parking = parking
        if were_parked:
            self.place_unassigned()

    def place_unassigned(self) -> None:
        """Looks again for workers, unless what comes is parked. Who finds none is back at once."""
        if self.parking:
            return
        for sequence in self.unassigned:
            self.unassigned.remove(sequence.key)
            self._place_again(sequence)

    def expire(self) -> None:
        """Deadlines of those who wait."""
        for sequence in self.unassigned.expired(self._clock()):
            self._end_unassigned(sequence, Reason.DEADLINE)

    def tick(self) -> None:
        """A few times a second: fetches that nobody answers, adapters that are waited for."""
        self.neighbourhood.tick()
        self._adapters.settle()
        if not self.parking:
            self._adapters.begin_round()
            for sequence in self.unassigned:
                if isinstance(sequence.adapter, AdapterId):
                    self._look_again(sequence, sequence.adapter)

    def _look_again(self, sequence: Sequence, adapter: AdapterId) -> None:
        """For a worker that has its adapter, or could."""
        self.unassigned.remove(sequence.key)
        if self._adapters.can_come(adapter):
            self._place_again(sequence)
            return
        failure = Failure("NOT_FOUND", f"The model `{adapter.name}` does not exist any more.")
        self._deliver(Events(finished=finish(sequence, Reason.ERROR, failure=failure)))

    def _end_unassigned(self, sequence: Sequence, reason: Reason) -> None:
        self.unassigned.remove(sequence.key)
        failure = None
        if reason is Reason.DEADLINE:
            failure = Failure("DEADLINE_EXCEEDED", "deadline passed while no worker could take the sequence")
        self._deliver(Events(finished=finish(sequence, reason, failure=failure)))

    # From here to there.

    def _place_again(self, sequence: Sequence) -> None:
        """One that was taken in. Where that fails it ends, and those behind it go on."""
        try:
            self.place(sequence)
        except Exception:
            log.exception("a sequence cannot be placed", request=sequence.request_id)
            self.drop(sequence)
            failure = Failure("INTERNAL", "internal error")
            self._deliver(Events(finished=finish(sequence, Reason.ERROR, failure=failure)))

    def place(self, sequence: Sequence) -> None:
        if self._terms.layout is not None:
            complete(sequence, self._terms.layout.block_size)
        able = [r for r in self._replicas.values() if not r.outdated and r.adapters.takes(sequence.adapter)]
        replica = self._home(sequence) or self.handovers.place(sequence, able)
        if replica is None:
            replica = next((r for r in able if not r.leaving), None)  # it words the refusal
        if replica is None:
            self.unassigned.add(sequence)
            if isinstance(sequence.adapter, AdapterId) and not able:
                self._adapters.fetch(sequence.adapter)
            return
        if isinstance(sequence.adapter, AdapterId):
            replica.adapters.use(sequence.adapter)
        self._replica_of[sequence.key] = replica
        if sequence.family is not None:
            sequence.family.home = replica
        self.handovers.placed(sequence, replica)
        replica.add(sequence)  # last: it takes in the whole sequence or nothing

    def _home(self, sequence: Sequence) -> Replica | None:
        """Where its siblings are, as long as there is a slot: they compute the prompt for it."""
        if sequence.family is None:
            return None
        home = next((r for r in self._replicas.values() if r is sequence.family.home and r.takes_sequences), None)
        if home is None or not home.adapters.takes(sequence.adapter):
            return None
        if home.core.num_sequences >= home.core.limits.max_num_seqs:
            return None
        return home

    def _move(self, sequences: list[Sequence], last_step_at: float | None) -> None:
        self._metrics.sequences_moved.inc(len(sequences))
        self.num_moved += len(sequences)
        for sequence in sequences:
            del self._replica_of[sequence.key]
            self._traces.moved(sequence)
            if sequence.started:
                sequence.moved_at = self._clock() if last_step_at is None else last_step_at
            if len(sequence.losses) < self._settings.max_worker_losses:
                self._place_again(sequence)
            else:
                text = f"{len(sequence.losses)} workers in a row were lost while this ran on them, the last time alone"
                self._deliver(Events(finished=finish(sequence, Reason.ERROR, failure=Failure("INTERNAL", text))))

    def _hand_over(self, sequence: Sequence, target: Replica) -> None:
        """It goes on there."""
        source = self._replica_of[sequence.key]
        source.flush()  # its tokens first
        source.core.migrate_out(sequence)
        source.wake()
        if isinstance(sequence.adapter, AdapterId):
            target.adapters.use(sequence.adapter)
        self._replica_of[sequence.key] = target
        target.add(sequence)
