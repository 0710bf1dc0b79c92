"""quire.worker.v1: attachments of workers and their sessions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import grpc
import grpc.aio

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.terms import check_sizes
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.limits import CoreLimits, TierLimits
from quire.services.scheduler.core.policies import PolicyOptions
from quire.services.scheduler.core.timing.step_times import PipelineDepth
from quire.services.scheduler.kv_cache.groups import KVGroups
from quire.services.scheduler.operations.reconciler import WorkerReconciler
from quire.services.scheduler.operations.weight_streams import WeightStreams
from quire.services.scheduler.prefix_directory.directory import PrefixDirectory
from quire.services.scheduler.replicas.block_changes import BlockChanges
from quire.services.scheduler.replicas.encode_worker import ENCODE, EncodeWorker
from quire.services.scheduler.replicas.replica import Replica
from quire.services.scheduler.sessions.encode_session import (
    ENCODE_TIMING,
    EncodeSession,
    EncodeTiming,
    WorkerSession,
    check_encode_hello,
)
from quire.services.scheduler.sessions.guard import LoopGuard
from quire.services.scheduler.sessions.held_blocks import adopt
from quire.services.scheduler.sessions.open_session import OpenSession
from quire.services.scheduler.sessions.scheduling_policies import find_policy
from quire.services.scheduler.sessions.worker_balancer import WorkerBalancer
from quire.shared.errors import FailedPrecondition, QuireError, Unavailable, transport
from quire.shared.kv import kv_wire
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.pb.worker.v1 import worker_pb2_grpc
from quire.shared.prefix_index import BlockKeys
from quire.shared.process import lifecycle
from quire.shared.process.supervision import Tasks
from quire.shared.rpc import worker_hello
from quire.shared.rpc.duplex import Duplex
from quire.shared.rpc.parts import PartStream
from quire.shared.rpc.trust import HandshakeAcceptor
from quire.shared.settings import SchedulerSettings
from quire.shared.version import VERSION

log = logger("workers")

OVERDUE_CHECK_S = 0.25
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one Attach call per worker, and the weight streams that workers fetch."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cluster: WorkerCluster,
        metrics: SchedulerMetrics,
        door: HandshakeAcceptor,
        *,
        on_change: Callable[[], None],
        on_garbage: Callable[[], None],
        directory: PrefixDirectory | None,
        reconciler: WorkerReconciler,
        streams: WeightStreams,
        encode_timing: EncodeTiming = ENCODE_TIMING,
    ) -> None:
        """`on_garbage` is called when a session has ended: the objects of its worker form reference cycles."""
        self._keeping_up = reconciler
        self._streams = streams
        self._encode_timing = encode_timing
        self._settings = settings
        self._policy = find_policy(settings.scheduling_policy)
        self._cluster = cluster
        self._metrics = metrics
        self._door = door
        self._on_change, self._on_garbage = on_change, on_garbage
        self._directory = directory
        self.balancer = WorkerBalancer(lambda: [] if directory is None else directory.peers)
        self._sessions: dict[str, OpenSession] = {}
        self._tasks = Tasks()

    async def Attach(
        self, _requests: object, context: grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse]
    ) -> None:
        """Serves the gRPC stream of one worker: authenticates it, redirects it to a less loaded scheduler, or
        attaches it and serves its session to the end. Errors abort the call with their status code."""
        interval_s = self._settings.heartbeat_interval_ms / 1000
        heartbeat = pb.AttachResponse(heartbeat=pb.Heartbeat())
        session: WorkerSession = Duplex(PartStream(context), heartbeat, interval_s)
        try:
            caller = await self._door.authenticate(context, pb.AttachResponse, SERVICE_NAME)
            hello = await self._hello(session)
            self._door.check_name(caller, f"worker {hello.worker_id}")
            elsewhere = self._redirect_address(hello)
            if elsewhere is not None:
                await context.write(pb.AttachResponse(redirect=pb.Redirect(address=elsewhere)))
                return
            await self._supersede(hello)
            await self._run_session(session, hello)
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)
        except Exception:
            log.exception("worker session failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error: see the scheduler's log")

    async def FetchWeights(
        self, _requests: object, context: grpc.aio.ServicerContext[pb.FetchWeightsRequest, pb.FetchWeightsResponse]
    ) -> None:
        """Serves one worker's copy of a weights stream, piece by piece, after authentication. Errors abort the call
        with their status code."""
        try:
            caller = await self._door.authenticate(context, pb.FetchWeightsResponse, SERVICE_NAME)
            request = await context.read()
            if not isinstance(request, pb.FetchWeightsRequest):
                return  # the caller left
            if not request.HasField("fetch"):
                text = "the first message of a fetch must be fetch"
                raise self._door.unexpected_handshake(request.WhichOneof("message")) or FailedPrecondition(text)
            self._door.check_name(caller, f"worker {request.fetch.worker_id}")
            async for piece in self._streams.pieces(request.fetch.worker_id, request.fetch.stream_id):
                await context.write(pb.FetchWeightsResponse(piece=piece))
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)

    def _redirect_address(self, hello: pb.WorkerHello) -> str | None:
        """Returns the address that a new worker is redirected to, or None. While draining, this includes workers that a
        peer redirected here before it knew."""
        if self._cluster.draining:
            return self.balancer.drain_target()
        if hello.role == ENCODE:
            return None  # each scheduler has those that are configured for it
        return None if hello.redirected else self.balancer.redirect_target(len(self._cluster.replicas))

    async def _run_session(self, session: WorkerSession, hello: pb.WorkerHello) -> None:
        """Runs the session in a task of its own, so that a later session of the same worker can end it. Raises the
        session's error, FailedPrecondition if the worker attached again."""
        task = self._tasks.start(f"session of worker {hello.worker_id}", self._serve(session, hello))
        self._sessions[hello.worker_id] = OpenSession(
            hello, task
        )  # removed when it has ended: the next session waits for that
        task.add_done_callback(lambda _: self._sessions.pop(hello.worker_id))
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled() and not task.cancelling():
            raise Unavailable(f"the session of worker {hello.worker_id} was cancelled unexpectedly")
        if task.cancelled():
            raise FailedPrecondition(f"worker {hello.worker_id} attached again; this session has ended")
        task.result()

    async def _hello(self, session: WorkerSession) -> pb.WorkerHello:
        """Receives and returns the first message of a session. Raises FailedPrecondition if it is not a valid hello,
        or differs from what the services of the cluster agree on."""
        first = await session.receive()
        kind = first.WhichOneof("message")
        if kind != "hello":
            raise self._door.unexpected_handshake(kind) or FailedPrecondition(
                "the first message of a session must be hello"
            )
        hello = first.hello
        worker_hello.group(hello)
        if hello.role == ENCODE:
            check_encode_hello(hello, self._cluster.terms)
            return hello
        check_sizes(hello)
        self._cluster.terms.agree_on_model(hello.model, f"worker {hello.worker_id}")
        self._cluster.terms.agree_on_layout(hello)
        self._cluster.terms.agree_on_groups(hello)
        self._cluster.terms.agree_on_logprobs(hello)
        self._cluster.terms.agree_on_grammars(hello)
        self._cluster.terms.agree_on_invariance(hello)
        self._cluster.terms.agree_on_adapters(hello)
        return hello

    async def _supersede(self, hello: pb.WorkerHello) -> None:
        """Ends the old session of a worker that attaches again, and returns when it has ended and its sequences have
        moved. Raises FailedPrecondition if the old session is that of another live process."""
        while (old := self._sessions.get(hello.worker_id)) is not None:  # another session may have started meanwhile
            if not old.is_same_process(hello) and await old.is_alive(self._settings.heartbeat_interval_ms / 1000):
                log.warning("rejected a second worker with the same id", worker=hello.worker_id, pid=hello.pid)
                raise FailedPrecondition(old.duplicate_id_error(hello), field="worker_id")
            if not old.task.done() and not old.task.cancelling():
                self._metrics.workers_lost.labels("superseded").inc()
            old.task.cancel()
            await asyncio.wait([old.task])

    async def _serve(self, session: WorkerSession, hello: pb.WorkerHello) -> None:
        """Creates and attaches the worker's replica, then serves its messages until it leaves or is lost; at the end
        detaches it, which moves its sequences to other workers."""
        if hello.role == ENCODE:
            await self._serve_encode_worker(session, hello)
            return
        guard = LoopGuard(asyncio.get_running_loop())
        replica = await self._replica(session, hello, guard)
        self._cluster.agree_on_weights(replica)  # no other worker attaches between this call and the attachment
        session.send(self._welcome(hello, replica.epoch))
        try:
            self._cluster.attach(replica)
            self._publish(replica)
            self._on_change()
            log.info(
                "worker attached",
                worker=replica.id,
                epoch=replica.epoch,
                blocks=hello.kv_cache.num_blocks,
                device=hello.device,
            )
            await lifecycle.run_until_first(
                self._read(session, replica),
                guard.failed,
                self._watch(replica),
                self._keeping_up.run(replica),
                session.pump(),
            )
        except Unavailable as error:
            replica.was_abandoned = True
            self._metrics.workers_lost.labels("silent").inc()
            log.warning("worker lost", worker=replica.id, epoch=replica.epoch, reason=error.message)
        except Exception:
            replica.was_abandoned = True
            raise
        finally:
            if self._directory is not None:
                self._directory.untrack(replica)
            self._cluster.detach(replica, lost=not replica.leaving)
            self._on_change()
            self._on_garbage()

    async def _serve_encode_worker(self, session: WorkerSession, hello: pb.WorkerHello) -> None:
        """Attaches an encode worker and serves its messages until it leaves or is lost."""
        worker = EncodeWorker(hello, _next_epoch(hello), session.send)
        session.send(self._welcome(hello, worker.epoch))
        served, fleet = self._sessions[hello.worker_id], self._cluster.encoders
        session_of_worker = EncodeSession(
            session,
            worker,
            served,
            fleet,
            self._cluster.target_state,
            deadline_s=self._settings.step_deadline_s,
            timing=self._encode_timing,
        )
        await session_of_worker.run(self._metrics)

    def _welcome(self, hello: pb.WorkerHello, epoch: int) -> pb.AttachResponse:
        """Returns the answer to a worker's hello."""
        welcome = pb.SchedulerWelcome(
            scheduler_id=self._settings.name,
            epoch=epoch,
            version=VERSION,
            max_steps_in_flight=PipelineDepth.max_steps_for(
                self._settings.max_steps_in_flight, max(hello.parallelism.num_stages, 1)
            ),
            heartbeat_interval_ms=self._settings.heartbeat_interval_ms,
            peers=self.balancer.addresses,
        )
        return pb.AttachResponse(welcome=welcome)

    def _publish(self, replica: Replica) -> None:
        terms = self._cluster.terms
        if self._directory is not None and terms.model is not None and terms.layout is not None:
            self._directory.track(replica, BlockKeys.of(self._settings.redis_namespace, terms.model, terms.layout))

    async def _replica(self, session: WorkerSession, hello: pb.WorkerHello, guard: LoopGuard) -> Replica:
        """Creates a replica with an empty core, adopts the blocks that the worker kept, and chooses an epoch greater
        than the worker's last one. Does not attach it."""
        changes = BlockChanges()
        observer = changes if self._directory is not None else None
        core = Core(self._limits(hello), counts=self._cluster.counts_of(hello.worker_id), observer=observer)
        await adopt(core, hello)
        return Replica(
            hello,
            _next_epoch(hello),
            core,
            send=session.send,
            deliver=self._cluster.deliver,
            clock=time.monotonic,
            call_soon=guard.call_soon,
            call_later=guard.call_later,
            metrics=self._metrics,
            changes=changes,
        )

    def _limits(self, hello: pb.WorkerHello) -> CoreLimits:
        """Returns the core's limits: the sizes in the worker's hello, reduced by the scheduler's settings where
        these are lower."""
        settings = self._settings
        usable = hello.kv_cache.num_blocks - 1
        specs = kv_wire.from_proto(hello.kv_cache.groups, f"worker {hello.worker_id}")
        groups = KVGroups(specs, hello.layout.block_size, hello.limits.max_num_batched_tokens)
        return CoreLimits(
            num_blocks=hello.kv_cache.num_blocks,
            block_size=hello.layout.block_size,
            kv_specs=specs,
            max_num_seqs=min(settings.max_num_seqs or hello.limits.max_num_seqs, hello.limits.max_num_seqs),
            max_num_batched_tokens=min(
                settings.max_num_batched_tokens or hello.limits.max_num_batched_tokens,
                hello.limits.max_num_batched_tokens,
            ),
            max_model_len=groups.max_sequence_tokens(usable, hello.limits.max_model_len),
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            longest_stream_gap_s=settings.max_stream_gap_ms / 1000,
            watermark_blocks=int(settings.watermark * usable),
            max_steps_in_flight=settings.max_steps_in_flight,
            num_micro_batches=max(hello.parallelism.num_stages, 1),
            num_speculative_tokens=hello.drafting.num_speculative_tokens,
            fixed_draft_length=hello.drafting.fixed_length,
            drafts_constrained_only=hello.drafting.constrained_only,
            enable_prefix_caching=settings.enable_prefix_caching,
            prefix_grain=settings.prefix_grain,
            num_query_vectors=hello.kv_cache.num_query_vectors,
            encoder_capacity=hello.encoder.capacity,
            whole_media=hello.encoder.whole_items,
            policy=self._policy,
            policy_options=PolicyOptions(settings.priority_aging_s, settings.tenant_weights),
            tiers=TierLimits(
                hello.kv_cache.num_host_blocks,
                hello.kv_cache.num_disk_blocks,
                settings.kv_offloading_policy,
                settings.kv_offloading_store_threshold,
            ),
        )

    async def _read(self, session: WorkerSession, replica: Replica) -> None:
        """Handles a worker's messages until it has left or the stream ends; a stream that ends without a departure
        counts as a lost worker. Raises FailedPrecondition for invalid messages."""
        served = self._sessions[replica.id]
        is_leaving = False  # set by the worker, not by a drain, after which it leaves when it has its redirect
        async for message in session.messages():
            served.num_messages += 1
            kind = message.WhichOneof("message")
            if kind == "result":
                self._cluster.traces.on_step_result(replica, message.result)
                replica.apply_result(message.result)
            elif kind == "grammar_prepared":
                replica.receive_prepared(message.grammar_prepared)
            elif kind == "media_prepared":
                replica.receive_media_prepared(message.media_prepared)
            elif kind == "transferred":
                replica.receive_transferred(message.transferred)
            elif kind == "fetched":
                replica.receive_fetched(message.fetched)
            elif kind == "adapter_loaded":
                replica.adapters.receive_loaded(message.adapter_loaded)
                self._on_change()
            elif kind == "device_order_done":
                replica.orders.receive_done(message.device_order_done)
            elif kind == "leaving":
                log.info("worker is leaving", worker=replica.id)
                is_leaving = True
                self._cluster.begin_leaving(replica)
                self._on_change()
            if is_leaving and self._cluster.can_leave(replica):
                return
        self._metrics.workers_lost.labels("closed").inc()

    async def _watch(self, replica: Replica) -> None:
        """Returns, which ends the attachment, when a live worker has not finished its oldest step for
        step_deadline_s seconds; late results of the worker have an old epoch."""
        most_checks = math.ceil(self._settings.step_deadline_s / OVERDUE_CHECK_S)
        oldest, num_checks = replica.oldest_sent_at, 0
        while (
            num_checks < most_checks
        ):  # counts checks, because a clock would include time in which this process itself was stopped
            await asyncio.sleep(OVERDUE_CHECK_S)
            before, oldest = oldest, replica.oldest_sent_at
            num_checks = num_checks + 1 if oldest is not None and oldest == before else 0
        replica.was_abandoned = True
        self._metrics.workers_lost.labels("step_deadline").inc()
        log.warning(
            "worker abandoned", worker=replica.id, epoch=replica.epoch, step_s=round(replica.oldest_step_age_s(), 1)
        )


def _next_epoch(hello: pb.WorkerHello) -> int:
    """Returns an epoch that is greater than the worker's last one."""
    return max(time.time_ns() // 1_000_000, hello.last_epoch + 1)
