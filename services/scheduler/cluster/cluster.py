"""Everything a scheduler looks after: workers, frontends, and where each sequence is."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator

from services.scheduler.cluster.adapters import Adapters
from services.scheduler.cluster.lobby import Lobby
from services.scheduler.cluster.placement import Placement
from services.scheduler.cluster.terms import Terms
from services.scheduler.core.counts import Counts
from services.scheduler.core.ending import Failure, Reason
from services.scheduler.core.plan import Events, Finished, finish
from services.scheduler.core.sequence import Sequence
from services.scheduler.frontends.batches import Batches
from services.scheduler.frontends.submission_checks import check_ids, refusal
from services.scheduler.frontends.submissions import SequenceFactory, adapter_of, complete
from services.scheduler.handover.handovers import Handovers
from services.scheduler.handover.neighbourhood import Neighbourhood
from services.scheduler.operations.wanted import Wanted
from services.scheduler.replicas.replica import Clock, Replica
from services.scheduler.request_traces import RequestTraces
from shared.adapter_contents import AdapterId
from shared.columns import ColumnError
from shared.errors import InvalidArgument
from shared.logs import logger
from shared.metrics.scheduler import SchedulerMetrics
from shared.pb.scheduler.v1 import scheduler_pb2 as pb
from shared.settings import SchedulerSettings
from shared.tracing import NoTraces

log = logger("cluster")


class Hold(enum.Enum):
    """Why no steps are run."""

    PAUSE = "pause"  # operators want it
    WEIGHTS = "weights"  # others are put in their place
    SLEEP = "sleep"  # devices have given memory back


Send = Callable[[pb.SessionResponse], None]


class Cluster:
    """One event loop's state; nothing in it waits."""

    def __init__(
        self, settings: SchedulerSettings, clock: Clock, metrics: SchedulerMetrics, traces: NoTraces | None = None
    ) -> None:
        self.terms = Terms()
        self.replicas: dict[str, Replica] = {}
        self.frontends: dict[int, Send] = {}
        self.lobby = Lobby()
        self.draining = False
        self.wanted = Wanted()
        self._holds: set[Hold] = set()  # why no worker runs steps
        self.parking = False  # what comes waits in the lobby, so that workers run empty
        self.num_moved = 0  # sequences, from worker to worker or back to the queue
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self.traces = RequestTraces(traces or NoTraces(), clock)
        self._factory = SequenceFactory()
        self._places: dict[int, dict[int, Sequence]] = {}  # owner -> sequence id -> sequence
        self._replica_of: dict[int, Replica] = {}  # key -> replica, for those not in the lobby
        self._counts: dict[str, Counts] = {}
        self._neighbourhood = Neighbourhood(self.replicas, settings.kv_handover)
        self._placement = Placement(settings.placement, self._neighbourhood.fetchable)
        threshold = settings.prefill_threshold
        self._handovers = Handovers(self._neighbourhood, self._placement, threshold, metrics, self._hand_over)
        self.adapters = Adapters(
            self.replicas, num_users=self._num_users, used_by=self._adapters_on, moved_in=self._adapter_came
        )

    # Frontends.

    def join(self, owner: int, send: Send) -> None:
        self.frontends[owner] = send
        self._places[owner] = {}

    def part(self, owner: int) -> Iterator[None]:
        """A frontend is gone: nobody wants its sequences any more. They end one by one, as the caller goes on."""
        del self.frontends[owner]
        for sequence_id in list(self._places[owner]):
            self.cancel(owner, [sequence_id], Reason.CANCELLED)
            yield
        del self._places[owner]

    def submit(self, owner: int, submission: pb.Submission) -> Iterator[None]:
        """Takes it in, sequence by sequence as the caller goes on; the owner must not part before the end. What cannot
        be taken in ends with an error, and nothing is left of it. InvalidArgument for what cannot be answered."""
        parking = self.parking  # not half of it
        next_id = submission.first_sequence_id
        end_id = next_id + submission.num_sequences
        try:
            check_ids(submission, self._places[owner])
            failure = self._refusal(submission)
            if failure is None:
                for sequence in self._factory.sequences(submission, owner, self._clock()):
                    num_ids = len(sequence.outputs) or 1
                    self.traces.taken_in(sequence, submission.traceparent)
                    self._take_in(sequence, parking=parking)
                    next_id += num_ids
                    yield
                return
        except InvalidArgument:
            raise
        except ColumnError as error:
            failure = Failure("INVALID_ARGUMENT", str(error))
        except Exception:
            log.exception("a submission cannot be taken in", request=submission.request_id)
            failure = Failure("INTERNAL", "internal error")
        for sequence_id in range(next_id, end_id):
            self._fail(owner, [sequence_id], failure)
            yield

    def _take_in(self, sequence: Sequence, *, parking: bool) -> None:
        for output in sequence.outputs or (sequence,):
            self._places[sequence.owner][output.sequence_id] = sequence
        if parking and self.parking and not sequence.has_begun:  # parking may have ended meanwhile
            self.lobby.add(sequence)
        else:
            self._place(sequence)

    def _fail(self, owner: int, sequence_ids: Iterable[int], failure: Failure) -> None:
        """They end here, whatever is known of them."""
        nobody = [Sequence(0, owner, sequence_id, bytearray(), 0, 0) for sequence_id in sequence_ids]
        for end in nobody:
            sequence = self._places[owner].pop(end.sequence_id, None)
            if sequence is not None:
                self._drop(sequence)
        self.deliver(Events(finished=[Finished(end, Reason.ERROR, failure=failure) for end in nobody]))

    def _drop(self, sequence: Sequence) -> None:
        replica = self._replica_of.pop(sequence.key, None)
        if replica is not None:
            replica.core.cancel(sequence.key)
        elif sequence.key in self.lobby:
            self.lobby.remove(sequence.key)

    def cancel(self, owner: int, sequence_ids: Iterable[int], reason: Reason) -> None:
        for sequence_id in sequence_ids:
            sequence = self._places[owner].get(sequence_id)
            if sequence is None:
                continue  # ended meanwhile
            try:
                self._cancel(sequence, reason)
            except Exception:
                log.exception("a cancellation failed", request=sequence.request_id)
                self._fail(owner, [sequence_id], Failure("INTERNAL", "internal error"))

    def _cancel(self, sequence: Sequence, reason: Reason) -> None:
        replica = self._replica_of.get(sequence.key)
        if replica is None:
            self._end_in_lobby(sequence, reason)
        else:
            replica.cancel(sequence.key, reason)

    # Workers.

    def counts_of(self, worker_id: str) -> Counts:
        """Totals that outlive an attachment."""
        return self._counts.setdefault(worker_id, Counts())

    def attach(self, replica: Replica) -> None:
        self.replicas[replica.id] = replica
        self.wanted.attached(replica, self.replicas.values())
        self._set(Hold.SLEEP, bool(self.wanted.asleep))
        replica.hold(bool(self._holds))
        replica.watch(self._handovers.pumped)
        self._workers_changed()
        self.adapters.attached(replica)
        if not self.parking:
            self._empty_lobby()

    def _workers_changed(self) -> None:
        self._neighbourhood.changed()
        self._handovers.changed(self.replicas.values())

    def _adapter_came(self) -> None:
        if not self.parking:
            self._empty_lobby()

    def _num_users(self, adapter: AdapterId) -> int:
        return sum(sequence.adapter == adapter for places in self._places.values() for sequence in places.values())

    def _adapters_on(self, replica: Replica) -> set[object]:
        """That sequences there go through."""
        sequences = (sequence for places in self._places.values() for sequence in places.values())
        return {sequence.adapter for sequence in sequences if self._replica_of.get(sequence.key) is replica}

    def _empty_lobby(self) -> None:
        for sequence in self.lobby:
            self.lobby.remove(sequence.key)
            self._place(sequence)

    def detach(self, replica: Replica, *, lost: bool) -> None:
        """A worker is gone: its sequences go on elsewhere, or wait. Does nothing if it was replaced already.

        `lost`: not of its own will.
        """
        if self.replicas.get(replica.id) is not replica:
            return
        del self.replicas[replica.id]
        replica.pause()
        replica.adapters.lose()
        replica.orders.lose()
        replica.flush()
        self._handovers.detached(replica)
        self._neighbourhood.detached(replica)
        self._workers_changed()
        moved = replica.core.evacuate(lost=lost)
        self._move(moved, replica.last_step_at)
        log.info("worker detached", worker=replica.id, epoch=replica.epoch, moved=len(moved), lost=lost)

    def let_leave(self, replica: Replica) -> None:
        """A worker wants to go: what runs moves to another worker; if there is none it ends here, or waits for one
        while generation is paused."""
        replica.leaving = True
        if self._holds or any(other.takes_sequences for other in self.replicas.values()):
            replica.pause()
        self._move(replica.core.evacuate_waiting(), replica.last_step_at)

    def has_left(self, replica: Replica) -> bool:
        """Whether a leaving worker may go now."""
        return replica.leaving and not replica.busy and (replica.paused or not len(replica.core.running))

    @property
    def paused(self) -> bool:
        """Generation is, by operators."""
        return Hold.PAUSE in self._holds

    @property
    def is_held(self) -> bool:
        """No worker runs steps, whatever the reason."""
        return bool(self._holds)

    def hold(self, reason: Hold, held: bool) -> None:
        """Pauses generation or lets it go on, on the workers that are there and on those to come; it goes on when no
        reason is left."""
        self._set(reason, held)
        self.park(False)
        if not self._holds:
            self._empty_lobby()

    def _set(self, reason: Hold, held: bool) -> None:
        before = bool(self._holds)
        (self._holds.add if held else self._holds.discard)(reason)
        if bool(self._holds) != before:
            for replica in self.replicas.values():
                replica.hold(bool(self._holds))

    def give_back(self, replica: Replica) -> None:
        """A worker has been taken from sequences: those that hold no slot there go on elsewhere, or wait."""
        self._move(replica.core.evacuate_waiting(), replica.last_step_at)

    def came_back(self) -> None:
        """Workers take sequences again, or have other weights."""
        self._neighbourhood.changed()
        if not self.parking:
            self._empty_lobby()

    def park(self, parking: bool) -> None:
        """Keeps what comes from the workers, which go on with what they have, or gives it to them."""
        were_parked = self.parking and not parking
        self.parking = parking
        if were_parked:
            self._empty_lobby()

    def abort(self) -> int:
        """Ends every sequence, with what it has. Returns how many that were."""
        count = 0
        for owner, places in self._places.items():
            count += len(places)
            self.cancel(owner, list(places), Reason.CANCELLED)
        return count

    # Time.

    def tick(self) -> None:
        """Deadlines of those who wait; called a few times a second."""
        for sequence in self.lobby.expired(self._clock()):
            self._end_in_lobby(sequence, Reason.DEADLINE)
        for replica in self.replicas.values():
            replica.wake()
        self._neighbourhood.tick()
        self.adapters.settle()
        if not self.parking:
            self.adapters.begin_round()
            for sequence in self.lobby:
                if isinstance(sequence.adapter, AdapterId):
                    self._look_again(sequence, sequence.adapter)

    # What it knows.

    @property
    def num_waiting(self) -> int:
        return len(self.lobby) + sum(r.core.num_waiting for r in self.replicas.values())

    @property
    def num_running(self) -> int:
        return sum(len(r.core.running) for r in self.replicas.values())

    def num_sequences_of(self, owner: int) -> int:
        return len(self._places.get(owner, {}))

    @property
    def num_placed(self) -> int:
        """Sequences that workers have."""
        return len(self._replica_of)

    @property
    def num_begun(self) -> int:
        """Sequences that have tokens of their output."""
        return sum(sequence.has_begun for places in self._places.values() for sequence in places.values())

    @property
    def idle(self) -> bool:
        return not self.lobby and not self._replica_of

    # Events.

    def deliver(self, events: Events) -> None:
        """To the frontends that own the sequences; those of a frontend that is gone have nobody to go to."""
        self.traces.happened(events, self._worker_of)
        batches = Batches(events.weight_version)
        batches.add(events)
        for finished in events.finished:
            sequence = finished.sequence
            self._places.get(sequence.owner, {}).pop(sequence.sequence_id, None)
            self._replica_of.pop(sequence.key, None)
        for owner, messages in batches.by_owner.items():
            send = self.frontends.get(owner)
            if send is not None:
                for message in messages:
                    send(message)

    def _worker_of(self, key: int) -> str:
        replica = self._replica_of.get(key)
        return "" if replica is None else replica.id

    def _refusal(self, submission: pb.Submission) -> Failure | None:
        """Why a submission is not taken; None if it is."""
        model = self.terms.model
        failure, reason = refusal(submission, 0 if model is None else model.vocab_size), "malformed"
        if failure is None and self.draining:
            failure, reason = Failure("UNAVAILABLE", "the scheduler is draining"), "draining"
        elif failure is None and self.num_waiting + submission.num_sequences > self._settings.max_waiting:
            text = f"{self.num_waiting} sequences wait; the limit is {self._settings.max_waiting}"
            failure, reason = Failure("RESOURCE_EXHAUSTED", text, retry_after_ms=1000), "max_waiting"
        elif failure is None and self._lacks(adapter_of(submission)):
            failure, reason = Failure("NOT_FOUND", f"The model `{submission.adapter}` does not exist."), "adapter"
        if failure is not None:
            self._metrics.refused.labels(reason).inc()
        return failure

    def _lacks(self, adapter: AdapterId | None) -> bool:
        return adapter is not None and bool(self.replicas) and not self.adapters.knows(adapter)

    def _place(self, sequence: Sequence) -> None:
        if self.terms.layout is not None:
            complete(sequence, self.terms.layout.block_size)
        able = [r for r in self.replicas.values() if not r.outdated and r.adapters.takes(sequence.adapter)]
        replica = self._home(sequence) or self._handovers.place(sequence, able)
        if replica is None:
            replica = next((r for r in able if not r.leaving), None)  # it words the refusal
        if replica is None:
            self.lobby.add(sequence)
            if isinstance(sequence.adapter, AdapterId) and not able:
                self.adapters.fetch(sequence.adapter)
            return
        if isinstance(sequence.adapter, AdapterId):
            replica.adapters.use(sequence.adapter)
        self._replica_of[sequence.key] = replica
        if sequence.family is not None:
            sequence.family.home = replica
        self._handovers.placed(sequence, replica)
        replica.add(sequence)  # last: it takes in the whole sequence or nothing

    def _home(self, sequence: Sequence) -> Replica | None:
        """Where its siblings are, as long as there is a slot: they compute the prompt for it."""
        if sequence.family is None:
            return None
        home = next((r for r in self.replicas.values() if r is sequence.family.home and r.takes_sequences), None)
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
            self.traces.moved(sequence)
            if sequence.started:
                sequence.moved_at = self._clock() if last_step_at is None else last_step_at
            if sequence.num_losses < self._settings.max_worker_losses:
                self._place(sequence)
            else:
                text = f"{sequence.num_losses} workers in a row were lost while this ran on them, the last time alone"
                self.deliver(Events(finished=finish(sequence, Reason.ERROR, failure=Failure("INTERNAL", text))))

    def _hand_over(self, sequence: Sequence, target: Replica) -> None:
        """It goes on there."""
        source = self._replica_of[sequence.key]
        source.flush()  # its tokens first
        source.core.part_with(sequence)
        source.wake()
        if isinstance(sequence.adapter, AdapterId):
            target.adapters.use(sequence.adapter)
        self._replica_of[sequence.key] = target
        target.add(sequence)

    def _look_again(self, sequence: Sequence, adapter: AdapterId) -> None:
        """For a worker that has its adapter, or could."""
        self.lobby.remove(sequence.key)
        if self.adapters.can_come(adapter):
            self._place(sequence)
            return
        failure = Failure("NOT_FOUND", f"The model `{adapter.name}` does not exist any more.")
        self.deliver(Events(finished=finish(sequence, Reason.ERROR, failure=failure)))

    def _end_in_lobby(self, sequence: Sequence, reason: Reason) -> None:
        self.lobby.remove(sequence.key)
        failure = None
        if reason is Reason.DEADLINE:
            failure = Failure("DEADLINE_EXCEEDED", "deadline passed while no worker could take the sequence")
        self.deliver(Events(finished=finish(sequence, reason, failure=failure)))
