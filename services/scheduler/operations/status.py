"""Status of a scheduler and of all services connected to it, for operators."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Protocol
from urllib.parse import urlsplit

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.drafts.speculation import DraftController
from quire.services.scheduler.kv_cache.block_tier import BlockTier
from quire.services.scheduler.prefix_directory.directory import PrefixDirectory
from quire.services.scheduler.replicas.encode_worker import ENCODE, EncodeWorker
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.settings import SchedulerSettings
from quire.shared.version import VERSION

STALLED_AFTER_S = 5.0  # work waits and no step has returned for this long


class FrontendSessions(Protocol):
    """Open frontend sessions, as the status reports them."""

    @property
    def epoch(self) -> int:
        """Start time of this scheduler process; identifies it."""

    @property
    def hellos(self) -> Mapping[int, scheduler_pb2.FrontendHello]:
        """First message of each session, by owner."""


class SchedulerStatus:
    """Read-only status of the scheduler and of the services connected to it, computed at each call."""

    def __init__(self, settings: SchedulerSettings, cluster: WorkerCluster, frontends: FrontendSessions) -> None:
        self._settings = settings
        self._cluster = cluster
        self._frontends = frontends
        self.address = ""  # set once the port is bound
        self.directory: PrefixDirectory | None = None

    def services(self) -> list[pb.ServiceStatus]:
        """Returns the status of the scheduler, its workers, its frontends and its Redis."""
        encoders = [_encode_worker(worker) for worker in self._cluster.encoders.workers.values()]
        return [self.scheduler(), *self.workers(), *encoders, *self._frontend_entries(), *self._redis()]

    def workers(self) -> Iterable[pb.ServiceStatus]:
        """Returns the entries of the workers that execute steps."""
        return [_worker(replica) for replica in self._cluster.replicas.values()]

    def scheduler(self) -> pb.ServiceStatus:
        """Returns the scheduler's own entry: identity, state, and the sums of its workers' counters and blocks."""
        workers = list(self.workers())
        status = pb.ServiceStatus(
            role=pb.ROLE_SCHEDULER,
            id=self._settings.name,
            pid=os.getpid(),
            address=self.address,
            state=self._state(),
            epoch=self._frontends.epoch,
            running=self._cluster.num_running,
            waiting=self._cluster.num_waiting,
            work=_total(worker.work for worker in workers),
            version=VERSION,
            sequences_moved=self._cluster.assignments.num_moved,
            weight_version=self._cluster.target_state.weights.version,
            asleep=sorted(self._cluster.target_state.asleep),
            sleep_level=self._cluster.target_state.sleep_level,
        )
        ages = [worker.last_step_age_s for worker in workers if worker.HasField("last_step_age_s")]
        if ages:
            status.last_step_age_s = min(ages)
        if workers:
            blocks = [worker.blocks for worker in workers]
            status.blocks.total = sum(b.total for b in blocks)
            status.blocks.free = sum(b.free for b in blocks)
            status.blocks.cached = sum(b.cached for b in blocks)
            status.blocks.used = sum(b.used for b in blocks)
        return status

    def _state(self) -> pb.State:
        """Returns draining, asleep, paused or ready, the first that applies."""
        if self._cluster.draining:
            return pb.STATE_DRAINING
        if self._cluster.target_state.asleep:
            return pb.STATE_ASLEEP
        return pb.STATE_PAUSED if self._cluster.is_paused else pb.STATE_READY

    @property
    def stalled(self) -> bool:
        """Whether a worker has work and its steps do not advance."""
        return any(worker.state == pb.STATE_STALLED for worker in self.workers())

    def _redis(self) -> list[pb.ServiceStatus]:
        """Returns the entry of Redis, without credentials of its URL; none if this scheduler uses no Redis."""
        if self.directory is None:
            return []
        state = {True: pb.STATE_READY, False: pb.STATE_DOWN, None: pb.STATE_STARTING}[self.directory.up]
        address = urlsplit(self._settings.redis)
        where = f"{address.hostname}:{address.port or 6379}" if address.hostname else address.path
        return [pb.ServiceStatus(role=pb.ROLE_REDIS, id="redis", address=where, state=state)]

    def _frontend_entries(self) -> list[pb.ServiceStatus]:
        """Returns an entry for each open frontend session, with its number of unfinished sequences."""
        return [
            pb.ServiceStatus(
                role=pb.ROLE_FRONTEND,
                id=hello.frontend_id,
                pid=hello.pid,
                address=hello.address,
                state=pb.STATE_READY,
                running=self._cluster.num_sequences_of(owner),
                version=hello.version,
            )
            for owner, hello in self._frontends.hellos.items()
        ]


def _worker(replica: Replica) -> pb.ServiceStatus:
    """Returns a worker's entry: identity, state, blocks of each tier, and counters since the scheduler knows it."""
    core, use = replica.core, replica.core.use
    status = pb.ServiceStatus(
        role=pb.ROLE_WORKER,
        id=replica.id,
        pid=replica.hello.pid,
        address=replica.hello.address,
        state=_state(replica),
        epoch=replica.epoch,
        num_ranks=replica.hello.parallelism.num_ranks,
        num_stages=replica.hello.parallelism.num_stages,
        num_contexts=replica.hello.parallelism.num_contexts,
        running=len(core.running),
        waiting=len(core.waiting),
        blocks=pb.BlockCounts(total=use.total, free=use.free, cached=use.cached, used=use.used),
        work=_work(core.counts, replica.tokens_per_s()),
        version=replica.hello.version,
        weight_version=replica.weights.version,
        asleep=sorted(replica.asleep),
        sleep_level=replica.sleep_level,
        worker_role="" if replica.hello.role == "both" else replica.hello.role,
    )
    if replica.last_step_at is not None:
        status.last_step_age_s = time.monotonic() - replica.last_step_at
    if core.speculation.enabled:
        status.drafts.CopyFrom(_drafts(core.speculation))
    if core.host_blocks is not None:
        status.host_memory.CopyFrom(_host_memory(core.host_blocks.tier, core.counts))
        if core.host_blocks.disk is not None:
            status.disk.CopyFrom(_disk(core.host_blocks.disk.tier, core.counts))
    return status


def _encode_worker(worker: EncodeWorker) -> pb.ServiceStatus:
    """Returns an encode worker's entry: identity, state, and the media items that it encodes and that wait for room."""
    return pb.ServiceStatus(
        role=pb.ROLE_WORKER,
        worker_role=ENCODE,
        id=worker.id,
        pid=worker.hello.pid,
        address=worker.hello.address,
        state=pb.STATE_DRAINING if worker.leaving else pb.STATE_READY,
        epoch=worker.epoch,
        running=worker.num_encoding,
        waiting=worker.num_waiting,
        version=worker.hello.version,
    )


def _host_memory(tier: BlockTier, counts: CoreCounts) -> pb.HostMemory:
    """Returns the size, use and lifetime transfers of a worker's host memory tier, in blocks."""
    return pb.HostMemory(
        total=tier.num_places,
        held=tier.num_held,
        stored=counts.stored_blocks,
        fetched=counts.fetched_blocks,
        failed_transfers=counts.failed_transfers,
    )


def _disk(tier: BlockTier, counts: CoreCounts) -> pb.DiskBlocks:
    """Returns the size, use and lifetime transfers of a worker's disk tier, in blocks; lost ones could not be read
    back, dropped ones not written."""
    return pb.DiskBlocks(
        total=tier.num_places,
        held=tier.num_held,
        stored=counts.disk_stored_blocks,
        fetched=counts.disk_fetched_blocks,
        lost=counts.disk_lost_blocks,
        dropped=counts.disk_dropped_blocks,
    )


def _drafts(speculation: DraftController) -> pb.DraftCounts:
    """Returns the lifetime counts of drafts of a worker, in total and by position, and the present draft length."""
    counts = speculation.counts
    return pb.DraftCounts(
        num_drafts=counts.drafts,
        num_draft_tokens=counts.draft_tokens,
        num_accepted_tokens=counts.accepted_tokens,
        num_accepted_tokens_per_pos=counts.accepted_by_position.tolist(),
        length=speculation.current_length,
    )


def _state(replica: Replica) -> pb.State:
    """Returns a worker's state: draining, stalled, asleep, outdated, paused or ready, the first that applies."""
    if replica.leaving:
        return pb.STATE_DRAINING
    if replica.oldest_step_age_s() > STALLED_AFTER_S:
        return pb.STATE_STALLED
    if replica.asleep:
        return pb.STATE_ASLEEP
    if replica.outdated:
        return pb.STATE_OUTDATED
    return pb.STATE_PAUSED if replica.generation_paused else pb.STATE_READY


def _work(counts: CoreCounts, tokens_per_s: float) -> pb.WorkCounts:
    """Returns the lifetime counts of tokens, preemptions and late-interaction documents of a worker."""
    return pb.WorkCounts(
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generated_tokens=counts.generated_tokens,
        preemptions=counts.preemptions,
        tokens_per_s=tokens_per_s,
        compared_documents=counts.compared_documents,
        query_hits=counts.query_hits,
    )


def _total(parts: Iterable[pb.WorkCounts]) -> pb.WorkCounts:
    """Returns the field-wise sums of work counters."""
    total = pb.WorkCounts()
    for part in parts:
        for field in pb.WorkCounts.DESCRIPTOR.fields:
            setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
    return total
