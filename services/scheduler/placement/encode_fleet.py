"""Encoding of media on workers of their own: an encode worker computes an item's rows, and the worker that needs them
fetches them from it.

A job lasts from a worker's order to encode an item until that worker has its rows. Whatever fails on the way starts it
again: at another encode worker, or at the worker itself, which has the encoder as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.services.scheduler.core.prerequisites.encoder_outputs import EncoderOrder
from quire.services.scheduler.core.sequences.ending import Failure
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.replicas.codec import encode_encoder_order
from quire.services.scheduler.replicas.encode_worker import EncodeWorker
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.worker.v1 import worker_pb2 as pb

log = logger("encoding")

MOST_FAILED_FETCHES = 2  # of a job; then the worker encodes the item itself


@dataclass(slots=True, eq=False)
class EncodeJob:
    """One item that one worker waits for. Compared by identity."""

    replica: Replica
    item: MediaItem
    worker: EncodeWorker | None = None  # None: it has been lost while the rows were fetched
    is_fetching: bool = False
    num_losses: int = 0  # encode workers that were lost while they encoded it
    num_failed_fetches: int = 0


class EncodeFleet:
    """The encode workers of a scheduler and the jobs that they have. Implements MediaRoute for the other workers."""

    def __init__(self, metrics: SchedulerMetrics, max_losses: int) -> None:
        """`max_losses`: number of encode workers lost with an item after which it fails."""
        self.workers: dict[str, EncodeWorker] = {}
        self._metrics, self._max_losses = metrics, max_losses
        self._jobs: dict[Replica, dict[bytes, EncodeJob]] = {}

    @property
    def num_encoding(self) -> int:
        """Jobs that wait for an encode worker."""
        return sum(not job.is_fetching for job in self._all())

    @property
    def num_fetching(self) -> int:
        """Jobs whose rows are being fetched."""
        return sum(job.is_fetching for job in self._all())

    # Encode workers.

    def attach(self, worker: EncodeWorker) -> None:
        """Adds an encode worker; orders from now on may go to it."""
        assert worker.id not in self.workers, "its last attachment has been detached"
        self.workers[worker.id] = worker

    def detach(self, worker: EncodeWorker, *, lost: bool) -> None:
        """Removes an encode worker and starts its jobs again. Does nothing if the worker is not attached. `lost`: the
        worker did not leave on its own."""
        if self.workers.get(worker.id) is not worker:
            return
        del self.workers[worker.id]
        jobs = [job for job in self._all() if job.worker is worker]
        for job in jobs:
            job.worker = None
            if job.is_fetching:
                continue  # its worker reports whether the rows have arrived
            if lost and worker.is_encoding(job.item.identifier):
                job.num_losses += 1
            self._restart(job, "worker_lost")
        if jobs:
            log.info("media items of a detached encode worker are prepared again", worker=worker.id, items=len(jobs))

    def receive_prepared(self, worker: EncodeWorker, wire: pb.MediaPrepared) -> None:
        """Handles an encode worker's answer: the rows are fetched, or the workers that wait for them encode the item
        themselves. Raises FailedPrecondition for an unknown order."""
        failed = wire.HasField("error")
        worker.complete(wire.identifier, failed=failed)
        waiting = [job for job in self._all() if job.worker is worker and job.item.identifier == wire.identifier]
        for job in waiting:
            if not failed:
                job.replica.count_encoding(wire)
                self._fetch(job)
                continue
            job.worker = None
            self._count("encoding_failed")
            self._encode_at_replica(job)

    def release_unused(self) -> None:
        """Releases all rows that no worker waits for."""
        for worker in self.workers.values():
            worker.release_unused()

    # Other workers.

    def order(self, replica: Replica, order: EncoderOrder) -> None:
        """Sends an order of a worker's core: to an encode worker if it is to encode an item and there is one."""
        if order.item is None:
            replica.send(encode_encoder_order(order))
        else:
            job = EncodeJob(replica, order.item)
            self._jobs.setdefault(replica, {})[order.identifier] = job
            self._start(job)

    def handle_report(self, replica: Replica, wire: pb.MediaPrepared) -> bool:
        """Handles a worker's report on an item. Returns False if it is left to the core: the item is ready, or cannot
        be encoded. If the rows cannot be fetched, the job starts again."""
        job = self._jobs.get(replica, {}).get(wire.identifier)
        if job is None:
            return False
        source, job.worker = job.worker, None
        if source is not None:
            source.leave(wire.identifier)
        if not wire.HasField("error"):
            self._count("done")
            del self._jobs[replica][wire.identifier]
            return False
        job.num_failed_fetches += 1
        if source is not None:
            replica.links[source.id].record_failure()
        log.warning("cannot fetch the rows of a media item", worker=replica.id, reason=wire.error.message)
        self._restart(job, "fetch_failed")
        return True

    def on_replica_detached(self, replica: Replica) -> None:
        """Ends the jobs of a worker that has detached."""
        for job in self._jobs.pop(replica, {}).values():
            if job.worker is not None:
                job.worker.leave(job.item.identifier)

    def check_invariant(self) -> None:
        """Raises AssertionError if the jobs and the users of rows differ."""
        for worker in self.workers.values():
            worker.check_invariant()
            users = [job for job in self._all() if job.worker is worker]
            assert worker.num_users == len(users), "each job is one user"
        assert all(job.is_fetching or job.worker is not None for job in self._all()), "no job waits for nothing"

    # One job.

    def _all(self) -> list[EncodeJob]:
        return [job for jobs in self._jobs.values() for job in jobs.values()]

    def _restart(self, job: EncodeJob, outcome: str) -> None:
        """Starts a job again, or ends it if too many encode workers were lost with it."""
        self._count(outcome)
        job.is_fetching = False
        if job.num_losses < self._max_losses:
            self._start(job)
            return
        replica, identifier = job.replica, job.item.identifier
        del self._jobs[replica][identifier]
        text = f"media: {job.num_losses} encode workers in a row were lost while they encoded an item of this request"
        replica.core.on_media_encoded(identifier, Failure("INTERNAL", text))
        replica.wake()

    def _start(self, job: EncodeJob) -> None:
        """Gives a job to an encode worker; without a suitable one, to the worker that needs the item."""
        worker = None if job.num_failed_fetches >= MOST_FAILED_FETCHES else self._choose(job)
        if worker is None:
            self._encode_at_replica(job)
            return
        job.worker = worker
        if worker.join(job.item):
            self._fetch(job)

    def _choose(self, job: EncodeJob) -> EncodeWorker | None:
        """Returns the encode worker that has the item, or the one with the fewest rows to compute first; None if none
        can take it, or none can be reached by the worker that needs it."""
        identifier, links = job.item.identifier, job.replica.links
        able = [worker for worker in self.workers.values() if _can_encode(worker, job)]
        able.sort(key=lambda worker: (identifier not in worker, worker.num_pending_rows, worker.num_rows))
        return next((worker for worker in able if links[worker.id].allow_attempt()), None)

    def _fetch(self, job: EncodeJob) -> None:
        """Orders the worker that needs an item to fetch its rows from the encode worker."""
        assert job.worker is not None, "it has the rows"
        job.is_fetching = True
        message = encode_encoder_order(EncoderOrder(job.item.identifier, job.item))
        message.prepare_media.rows.CopyFrom(job.worker.source)
        job.replica.send(message)

    def _encode_at_replica(self, job: EncodeJob) -> None:
        """Ends a job: the worker that needs the item encodes it."""
        del self._jobs[job.replica][job.item.identifier]
        job.replica.send(encode_encoder_order(EncoderOrder(job.item.identifier, job.item)))

    def _count(self, outcome: str) -> None:
        self._metrics.encode_jobs.labels(outcome).inc()


def _can_encode(worker: EncodeWorker, job: EncodeJob) -> bool:
    """Returns whether a worker takes items, has room for this one, and computes the rows that the other worker
    would."""
    ours, theirs = job.replica.hello.encoder.layout, worker.hello.encoder.layout
    has_same_encoder = ours and ours == theirs and worker.weights.encoder_update == job.replica.weights.encoder_update
    if worker.leaving or not has_same_encoder:
        return False
    return job.item.num_embeddings <= worker.hello.encoder.capacity
