"""State of a scheduler: its workers, frontends and sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from quire.services.scheduler.cluster.adapters import AdapterWorker, ClusterAdapters
from quire.services.scheduler.cluster.assignments import Assignments
from quire.services.scheduler.cluster.live_sequences import LiveSequences
from quire.services.scheduler.cluster.pause_reasons import PauseReason, PauseReasons
from quire.services.scheduler.cluster.request_traces import RequestTraces
from quire.services.scheduler.cluster.target_state import TargetState
from quire.services.scheduler.cluster.terms import ClusterTerms
from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.plan import Events, SequenceFinished
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence, WorkerLoss
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.frontends.batches import OwnerBatches
from quire.services.scheduler.frontends.submission_checks import check_ids, refusal
from quire.services.scheduler.frontends.submissions import SequenceFactory, adapter_of
from quire.services.scheduler.placement.encode_fleet import EncodeFleet
from quire.services.scheduler.replicas.replica import Clock, Replica
from quire.shared.columns import ColumnError
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.settings import SchedulerSettings
from quire.shared.tracing import NoTraces

log = logger("cluster")

WEIGHTS_CHANGED = Failure(
    "INTERNAL", "no worker has the weights any more that computed the tokens of this request so far; send it again"
)
Send = Callable[[pb.SessionResponse], None]


class WorkerCluster:
    """State of one event loop; no method blocks or waits."""

    def __init__(
        self, settings: SchedulerSettings, clock: Clock, metrics: SchedulerMetrics, traces: NoTraces | None = None
    ) -> None:
        self.terms = ClusterTerms()
        self.replicas: dict[str, Replica] = {}
        self.frontends: dict[int, Send] = {}
        self._media_addresses: dict[int, str] = {}  # by owner
        self.draining = False
        self.target_state = TargetState()
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self.traces = RequestTraces(traces or NoTraces(), clock)
        self._factory = SequenceFactory()
        self._live = LiveSequences()
        self._counts: dict[str, CoreCounts] = {}
        self._lost_connections: dict[
            str, WorkerLoss
        ] = {}  # last loss by worker, of attachments that the scheduler did not end itself
        self._pause_reasons = PauseReasons(self.replicas)
        self.adapters = ClusterAdapters(
            self.replicas,
            num_users=self._live.num_users,
            used_by=self._adapters_on,
            on_loaded=self._on_adapter_loaded,
        )
        self.encoders = EncodeFleet(metrics, settings.max_worker_losses)
        self.assignments = Assignments(
            settings,
            clock,
            metrics,
            replicas=self.replicas,
            terms=self.terms,
            adapters=self.adapters,
            traces=self.traces,
            deliver=self.deliver,
        )

    # Frontends.

    def add_frontend(self, owner: int, send: Send, media_address: str = "") -> None:
        """Adds a frontend's session. `media_address`: its MediaService; empty: it submits no media."""
        self.frontends[owner] = send
        self._media_addresses[owner] = media_address
        self._live.add_owner(owner)

    def remove_frontend(self, owner: int) -> Iterator[None]:
        """Removes a frontend and cancels its sequences, one per iteration of the caller."""
        del self.frontends[owner], self._media_addresses[owner]
        for sequence_id in list(self._live.of(owner)):
            self.cancel(owner, [sequence_id], Reason.CANCELLED)
            yield
        self._live.remove_owner(owner)

    def submit(self, owner: int, submission: pb.Submission) -> Iterator[None]:
        """Accepts a submission, one sequence per iteration of the caller; the owner must not be removed before the end.
        A sequence that cannot be accepted ends with an error and leaves no state. Raises InvalidArgument if the error
        could not be reported by sequence id."""
        parking = self.assignments.parking  # one decision for the whole submission
        next_id = submission.first_sequence_id
        end_id = next_id + submission.num_sequences
        try:
            check_ids(submission, self._live.of(owner))
            failure = self._refusal(submission)
            if failure is None:
                address = self._media_addresses[owner]
                for sequence in self._factory.sequences(submission, owner, self._clock(), address):
                    num_ids = len(sequence.outputs) or 1
                    self.traces.on_submitted(sequence, submission.traceparent)
                    self._live.add(sequence)
                    self.assignments.assign(sequence, parking=parking)
                    next_id += num_ids
                    yield
                return
        except InvalidArgument:
            raise
        except ColumnError as error:
            failure = Failure("INVALID_ARGUMENT", str(error))
        except Exception:
            log.exception("cannot accept a submission", request=submission.request_id)
            failure = Failure("INTERNAL", "internal error")
        for sequence_id in range(next_id, end_id):
            self._fail(owner, [sequence_id], failure)
            yield

    def _fail(self, owner: int, sequence_ids: Iterable[int], failure: Failure) -> None:
        """Ends sequences with an error, whether or not the cluster knows them."""
        placeholders = [Sequence(0, owner, sequence_id, SequenceTokens(), 0, 0) for sequence_id in sequence_ids]
        for placeholder in placeholders:
            sequence = self._live.remove(owner, placeholder.sequence_id)
            if sequence is not None:
                self.assignments.discard(sequence)
        self.deliver(
            Events(
                finished=[SequenceFinished(placeholder, Reason.ERROR, failure=failure) for placeholder in placeholders]
            )
        )

    def cancel(self, owner: int, sequence_ids: Iterable[int], reason: Reason) -> None:
        """Ends sequences of an owner with `reason`; ids that are unknown or finished are skipped. If a cancellation
        fails, the sequence ends with an internal error."""
        for sequence_id in sequence_ids:
            sequence = self._live.of(owner).get(sequence_id)
            if sequence is None:
                continue  # finished meanwhile
            try:
                self.assignments.cancel(sequence, reason)
            except Exception:
                log.exception("cannot cancel a request", request=sequence.request_id)
                self._fail(owner, [sequence_id], Failure("INTERNAL", "internal error"))

    # Workers.

    def counts_of(self, worker_id: str) -> CoreCounts:
        """Returns a worker's counters, which outlive its attachments."""
        return self._counts.setdefault(worker_id, CoreCounts())

    def has(self, replica: Replica) -> bool:
        """Returns whether this attachment of a worker is current."""
        return self.replicas.get(replica.id) is replica

    def agree_on_weights(self, replica: Replica) -> None:
        """Checks a worker's weights just before it attaches. Raises FailedPrecondition if they differ from those of
        attached workers. If no worker is attached, they become the cluster's weights, and sequences with tokens of the
        former weights end. The weights at the start do not matter if all workers are to be updated anyway."""
        if max(replica.weights.update, self.target_state.weights.update) > 0:
            return
        if self.terms.agree_on_weights(replica.hello, in_use=bool(self.replicas)):
            log.warning("a worker reattached with other weights", worker=replica.id, ended=self._live.num_begun)
            for owner in self._live.owners:
                begun = [sequence_id for sequence_id, one in self._live.of(owner).items() if one.has_output]
                self._fail(owner, begun, WEIGHTS_CHANGED)

    def attach(self, replica: Replica) -> None:
        """Adds a worker whose session has been accepted: brings it to the cluster's pause state, offers its adapters
        and places unassigned sequences."""
        assert replica.id not in self.replicas, "its last attachment has been detached"
        self.replicas[replica.id] = replica
        replica.media_route = self.encoders
        self._clear_reconnected_loss(replica)
        self.target_state.on_worker_attached(replica, self.replicas.values())
        if self.target_state.asleep:  # otherwise other workers may be falling asleep
            self._pause_reasons.set(PauseReason.SLEEP, True)
        replica.set_generation_paused(bool(self._pause_reasons))
        self.assignments.on_worker_attached(replica)
        self.adapters.on_worker_attached(replica)
        self.assignments.place_unassigned()

    def _clear_reconnected_loss(self, replica: Replica) -> None:
        """Removes a loss from all sequences if the same worker process attaches again after a lost connection: no
        sequence caused it. Its last epoch is an earlier one if the connection was lost before the welcome arrived."""
        lost = self._lost_connections.pop(replica.id, None)
        if lost is None or not replica.hello.connection_lost or not 0 < replica.hello.last_epoch <= lost.epoch:
            return
        for sequence in self._live:
            if lost in sequence.losses:
                sequence.losses = tuple(loss for loss in sequence.losses if loss != lost)

    def _on_adapter_loaded(self) -> None:
        self.assignments.place_unassigned()

    def _adapters_on(self, replica: AdapterWorker) -> set[object]:
        """Returns the adapters of the sequences on a worker."""
        return {s.adapter for s in self._live if self.assignments.replica_of(s.key) is replica}

    def detach(self, replica: Replica, *, lost: bool) -> None:
        """Removes a worker; its sequences move to other workers or wait. Does nothing if the worker is not attached.

        `lost`: the worker did not leave on its own.
        """
        if not self.has(replica):
            return
        del self.replicas[replica.id]
        replica.pause()
        self.encoders.on_replica_detached(replica)
        replica.adapters.fail_pending()
        replica.orders.fail_pending()
        replica.flush()
        loss = WorkerLoss(replica.id, replica.epoch) if lost else None
        if loss is not None and not replica.was_abandoned:
            self._lost_connections[replica.id] = loss
        num_moved = self.assignments.on_worker_detached(replica, loss)
        write_log = log.warning if lost else log.info
        write_log("worker detached", worker=replica.id, epoch=replica.epoch, moved=num_moved, lost=lost)

    def begin_leaving(self, replica: Replica) -> None:
        """Starts the departure of a worker: it gets no sequences any more, waiting ones move, and running ones move
        when its steps have returned; without another worker they finish here, or wait for one while generation is
        paused."""
        replica.leaving = True
        if self._pause_reasons or any(other.takes_sequences for other in self.replicas.values()):
            replica.pause()
        self.assignments.reassign_waiting(replica)

    def can_leave(self, replica: Replica) -> bool:
        """Returns whether a leaving worker has nothing left to do."""
        return not replica.busy and (replica.paused or not len(replica.core.running))

    @property
    def is_paused_by_operator(self) -> bool:
        """Whether an operator has paused generation."""
        return PauseReason.OPERATOR in self._pause_reasons

    @property
    def is_paused(self) -> bool:
        """Whether no worker runs steps, whatever the reason."""
        return bool(self._pause_reasons)

    def set_paused(self, reason: PauseReason, paused: bool) -> None:
        """Adds or removes a pause reason, for attached workers and for those that attach later; generation resumes when
        no reason is left."""
        self._pause_reasons.set(reason, paused)
        self.set_parking(False)
        if not self._pause_reasons:
            self.assignments.place_unassigned()

    def reassign_waiting(self, replica: Replica) -> None:
        """Moves the sequences without a slot from a worker that no longer accepts sequences."""
        self.assignments.reassign_waiting(replica)

    def on_workers_available(self) -> None:
        """Places unassigned sequences, because workers accept sequences again or have other weights."""
        self.assignments.on_workers_available()

    def set_parking(self, parking: bool) -> None:
        """Keeps new sequences unassigned while workers finish what they have, or places them again."""
        self.assignments.set_parking(parking)

    def abort(self) -> int:
        """Ends every sequence with the output it has, as cancelled. Returns the number of sequences, counting each
        output of a beam search."""
        count = 0
        for owner in self._live.owners:
            ids = list(self._live.of(owner))
            count += len(ids)
            self.cancel(owner, ids, Reason.CANCELLED)
        return count

    # Periodic work.

    def tick(self) -> None:
        """Checks deadlines and wakes the workers; called a few times a second."""
        self.assignments.expire()
        for replica in self.replicas.values():
            replica.wake()
        self.assignments.tick()

    # State.

    @property
    def num_waiting(self) -> int:
        return len(self.assignments.unassigned) + sum(r.core.num_waiting for r in self.replicas.values())

    @property
    def num_running(self) -> int:
        return sum(len(r.core.running) for r in self.replicas.values())

    def num_sequences_of(self, owner: int) -> int:
        return len(self._live.of(owner))

    @property
    def num_begun(self) -> int:
        """Number of sequences with output tokens."""
        return self._live.num_begun

    @property
    def idle(self) -> bool:
        return self.assignments.idle

    # Events.

    def deliver(self, events: Events) -> None:
        """Sends events to the frontends that own the sequences; events for a frontend that is gone are dropped."""
        self.traces.on_events(events, self._worker_of)
        batches = OwnerBatches(events.weight_version)
        batches.add(events)
        for finished in events.finished:
            sequence = finished.sequence
            self._live.remove(sequence.owner, sequence.sequence_id)
            self.assignments.on_finished(sequence.key)
        for owner, messages in batches.by_owner.items():
            send = self.frontends.get(owner)
            if send is not None:
                for message in messages:
                    send(message)

    def _worker_of(self, key: int) -> str:
        replica = self.assignments.replica_of(key)
        return "" if replica is None else replica.id

    def _refusal(self, submission: pb.Submission) -> Failure | None:
        """Returns why a submission is rejected (malformed, draining, max_waiting, unknown adapter), which is counted
        in the metrics; None if it is accepted."""
        model = self.terms.model
        failure, reason = refusal(submission, 0 if model is None else model.vocab_size), "malformed"
        if failure is None and self.draining:
            failure, reason = Failure("UNAVAILABLE", "the scheduler is draining"), "draining"
        elif failure is None and self.num_waiting + submission.num_sequences > self._settings.max_waiting:
            text = (
                f"{self.num_waiting} sequences are waiting, the limit is {self._settings.max_waiting} "
                "(max_waiting); retry later"
            )
            failure, reason = Failure("RESOURCE_EXHAUSTED", text, retry_after_ms=1000), "max_waiting"
        elif failure is None and self._lacks(adapter_of(submission)):
            failure, reason = Failure("NOT_FOUND", f"The model `{submission.adapter}` does not exist."), "adapter"
        if failure is not None:
            self._metrics.refused.labels(reason).inc()
        return failure

    def _lacks(self, adapter: AdapterId | None) -> bool:
        return adapter is not None and bool(self.replicas) and not self.adapters.has_adapter(adapter)
