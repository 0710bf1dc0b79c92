"""Assignment of sequences to workers, and their moves between workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.services.scheduler.cluster.adapters import ClusterAdapters
from quire.services.scheduler.cluster.request_traces import RequestTraces
from quire.services.scheduler.cluster.terms import ClusterTerms
from quire.services.scheduler.cluster.unassigned import UnassignedSequences
from quire.services.scheduler.core.plan import Events, finished_events
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence, WorkerLoss
from quire.services.scheduler.frontends.submissions import complete_block_hashes
from quire.services.scheduler.placement.handovers import Handovers
from quire.services.scheduler.placement.peer_topology import PeerTopology
from quire.services.scheduler.placement.placement import Placement
from quire.services.scheduler.replicas.replica import Clock, Replica
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.settings import SchedulerSettings

log = logger("assignments")


class Assignments:
    """Maps each unfinished sequence to a worker; a sequence without a worker is unassigned."""

    def __init__(
        self,
        settings: SchedulerSettings,
        clock: Clock,
        metrics: SchedulerMetrics,
        *,
        replicas: Mapping[str, Replica],
        terms: ClusterTerms,
        adapters: ClusterAdapters,
        traces: RequestTraces,
        deliver: Callable[[Events], None],
    ) -> None:
        """`replicas`: by id, kept up to date by the owner; `deliver`: receives the events of sequences that end
        here."""
        self._settings, self._clock, self._metrics = settings, clock, metrics
        self._replicas, self._terms, self._adapters = replicas, terms, adapters
        self._traces, self._deliver = traces, deliver
        self.unassigned = UnassignedSequences()
        self.parking = False  # new sequences stay unassigned, so that workers run empty
        self.num_moved = 0  # moves of sequences between workers, or back to the queue
        self._replica_of: dict[int, Replica] = {}  # replica by sequence key, of assigned sequences
        self.peer_topology = PeerTopology(replicas, settings.kv_handover)
        placement = Placement(settings.placement, self.peer_topology.fetchable)
        threshold = settings.prefill_threshold
        self.handovers = Handovers(self.peer_topology, placement, threshold, metrics, self._migrate)

    # Sequences.

    def assign(self, sequence: Sequence, *, parking: bool) -> None:
        """Places a new sequence. `parking`: its submission started while new sequences were parked."""
        if parking and self.parking and not sequence.has_output:  # parking may have ended meanwhile
            self.unassigned.add(sequence)
        else:
            self.place(sequence)

    def cancel(self, sequence: Sequence, reason: Reason) -> None:
        """Ends a sequence with `reason`, on its worker or while it is unassigned."""
        replica = self._replica_of.get(sequence.key)
        if replica is None:
            self._end_unassigned(sequence, reason)
        else:
            replica.cancel(sequence.key, reason)

    def discard(self, sequence: Sequence) -> None:
        """Removes a sequence, whatever its state; emits no event."""
        replica = self._replica_of.pop(sequence.key, None)
        if replica is not None:
            replica.core.cancel(sequence.key)
        elif sequence.key in self.unassigned:
            self.unassigned.remove(sequence.key)

    def on_finished(self, key: int) -> None:
        """Forgets a sequence that has finished."""
        self._replica_of.pop(key, None)

    def replica_of(self, key: int) -> Replica | None:
        """Returns the worker of a sequence; None if it is unassigned."""
        return self._replica_of.get(key)

    @property
    def num_placed(self) -> int:
        """Number of sequences that are assigned to workers."""
        return len(self._replica_of)

    @property
    def idle(self) -> bool:
        return not self.unassigned and not self._replica_of

    # Workers.

    def on_worker_attached(self, replica: Replica) -> None:
        replica.set_pump_callback(self.handovers.on_pump)
        self._workers_changed()

    def on_worker_detached(self, replica: Replica, loss: WorkerLoss | None) -> int:
        """Moves the sequences of a detached worker to other workers, or back to the unassigned; returns how many.
        `loss`: set if the worker did not leave on its own."""
        self.handovers.on_worker_detached(replica)
        self.peer_topology.on_worker_detached(replica)
        self._workers_changed()
        moved = replica.core.evacuate(loss)
        self._reassign(moved, replica.last_step_at)
        return len(moved)

    def _workers_changed(self) -> None:
        self.peer_topology.on_workers_changed()
        self.handovers.on_workers_changed(self._replicas.values())

    def reassign_waiting(self, replica: Replica) -> None:
        """Moves the sequences without a slot on this worker to other workers, or back to the unassigned."""
        self._reassign(replica.core.evacuate_waiting(), replica.last_step_at)

    def on_workers_available(self) -> None:
        """Places unassigned sequences, because workers accept sequences again or have other weights."""
        self.peer_topology.on_workers_changed()
        self.place_unassigned()

    # Unassigned sequences.

    def set_parking(self, parking: bool) -> None:
        """Keeps new sequences unassigned while workers finish what they have, or places them again."""
        parking_ended = self.parking and not parking
        self.parking = parking
        if parking_ended:
            self.place_unassigned()

    def place_unassigned(self) -> None:
        """Places the unassigned sequences, unless new sequences are parked. Sequences without a suitable worker stay
        unassigned."""
        if self.parking:
            return
        for sequence in self.unassigned:
            self.unassigned.remove(sequence.key)
            self._place_or_fail(sequence)

    def expire(self) -> None:
        """Ends unassigned sequences whose deadline has passed."""
        for sequence in self.unassigned.expired(self._clock()):
            self._end_unassigned(sequence, Reason.DEADLINE)

    def tick(self) -> None:
        """Checks overdue fetches and missing adapters; called a few times a second."""
        self.peer_topology.tick()
        self._adapters.unload_unused()
        if not self.parking:
            self._adapters.begin_fetch_round()
            for sequence in self.unassigned:
                if isinstance(sequence.adapter, AdapterId):
                    self._retry_placement(sequence, sequence.adapter)

    def _retry_placement(self, sequence: Sequence, adapter: AdapterId) -> None:
        """Places a sequence that waits for its adapter, or ends it if no worker can load the adapter any more."""
        self.unassigned.remove(sequence.key)
        if self._adapters.may_be_loaded(adapter):
            self._place_or_fail(sequence)
            return
        failure = Failure("NOT_FOUND", f"The model `{adapter.name}` does not exist any more.")
        self._deliver(Events(finished=finished_events(sequence, Reason.ERROR, failure=failure)))

    def _end_unassigned(self, sequence: Sequence, reason: Reason) -> None:
        """Removes an unassigned sequence and emits its terminal events, with an error text if its deadline has
        passed."""
        self.unassigned.remove(sequence.key)
        failure = None
        if reason is Reason.DEADLINE:
            failure = Failure("DEADLINE_EXCEEDED", "the deadline passed while no worker could run the sequence")
        self._deliver(Events(finished=finished_events(sequence, reason, failure=failure)))

    # Placement and moves.

    def _place_or_fail(self, sequence: Sequence) -> None:
        """Places an accepted sequence. If that raises, the sequence ends with an error and the others are not
        affected."""
        try:
            self.place(sequence)
        except Exception:
            log.exception("cannot place a sequence", request=sequence.request_id)
            self.discard(sequence)
            failure = Failure("INTERNAL", "internal error")
            self._deliver(Events(finished=finished_events(sequence, Reason.ERROR, failure=failure)))

    def place(self, sequence: Sequence) -> None:
        """Assigns a sequence to the worker of its siblings, or to the one that the placement chooses, and adds it
        there. Without a suitable worker it becomes unassigned, and its adapter is fetched if no worker has it."""
        if self._terms.layout is not None:
            complete_block_hashes(sequence, self._terms.layout.block_size)
        candidates = [r for r in self._replicas.values() if not r.outdated and r.adapters.accepts(sequence.adapter)]
        replica = self._sibling_replica(sequence) or self.handovers.place(sequence, candidates)
        if replica is None:
            replica = next((r for r in candidates if not r.leaving), None)  # it produces the error text
        if replica is None:
            self.unassigned.add(sequence)
            if isinstance(sequence.adapter, AdapterId) and not candidates:
                self._adapters.order_load(sequence.adapter)
            return
        if isinstance(sequence.adapter, AdapterId):
            replica.adapters.mark_used(sequence.adapter)
        self._replica_of[sequence.key] = replica
        if sequence.sample_group is not None:
            sequence.sample_group.replica = replica
        self.handovers.on_placed(sequence, replica)
        replica.add(sequence)  # last: the worker accepts the whole sequence or nothing

    def _sibling_replica(self, sequence: Sequence) -> Replica | None:
        """Returns the worker of the sequence's siblings, if it has a free slot: they compute the prompt for it."""
        if sequence.sample_group is None:
            return None
        replica = next(
            (r for r in self._replicas.values() if r is sequence.sample_group.replica and r.takes_sequences), None
        )
        if replica is None or not replica.adapters.accepts(sequence.adapter):
            return None
        if replica.core.num_sequences >= replica.core.limits.max_num_seqs:
            return None
        return replica

    def _reassign(self, sequences: list[Sequence], last_step_at: float | None) -> None:
        """Places sequences of a worker that is gone or leaves elsewhere; those that lost too many workers end with
        an error. `last_step_at`: time from which the pause of their output is measured; None: now."""
        self._metrics.sequences_moved.inc(len(sequences))
        self.num_moved += len(sequences)
        for sequence in sequences:
            del self._replica_of[sequence.key]
            self._traces.on_moved(sequence)
            if sequence.was_admitted:
                sequence.moved_at = self._clock() if last_step_at is None else last_step_at
            if len(sequence.losses) < self._settings.max_worker_losses:
                self._place_or_fail(sequence)
            else:
                text = (
                    f"{len(sequence.losses)} workers in a row were lost while they ran this request, the last one "
                    "while it ran nothing else"
                )
                self._deliver(
                    Events(finished=finished_events(sequence, Reason.ERROR, failure=Failure("INTERNAL", text)))
                )

    def _migrate(self, sequence: Sequence, target: Replica) -> None:
        """Continues a running sequence on `target`, after its tokens so far have been delivered; its slot and blocks
        on the source are freed."""
        source = self._replica_of[sequence.key]
        source.flush()  # deliver its tokens first
        source.core.migrate_out(sequence)
        source.wake()
        if isinstance(sequence.adapter, AdapterId):
            target.adapters.mark_used(sequence.adapter)
        self._replica_of[sequence.key] = target
        target.add(sequence)
