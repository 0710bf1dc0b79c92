"""The resumable streams of a frontend: those it produces, and remote ones with local readers."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from quire.services.frontend.access.access import Caller
from quire.services.frontend.calls.calls import Call, Calls
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.request.request import Request
from quire.services.frontend.streams.follower import StreamFollower
from quire.services.frontend.streams.local_stream import (
    LocalStream,
    NullMessageWriter,
    RequestRestorer,
    restore_request,
)
from quire.services.frontend.streams.policy import (
    StreamPolicy,
    answer_of_store,
    check_resumable,
    not_found,
    refusal_reason,
    stream_exists,
)
from quire.services.frontend.streams.producer import LeaseLost, MessageWriter, StreamProducer
from quire.services.frontend.streams.store import StoreUnavailable, StreamKey, StreamStore, parse_request
from quire.services.frontend.streams.stream import Stream
from quire.services.frontend.streams.unread import count_reader, is_stored_whole, update_unread
from quire.services.frontend.streams.usage_report import report_usage
from quire.shared.errors import FailedPrecondition, Internal, QuireError, ResourceExhausted, Unavailable, transport
from quire.shared.logs import logger
from quire.shared.metrics.streams import StreamMetrics
from quire.shared.pb.frontend.v1 import stream_pb2 as pb
from quire.shared.process.supervision import Tasks, cancellable_sleep, run_restarting

log = logger("streams")

HEARTBEAT_S = 1.0  # a third of a lease
AT_ONCE = 64  # concurrent lease renewals
UNREAD_S = 10.0  # a remote stream without local readers is dropped after this time
RETRYABLE = (Unavailable, ResourceExhausted)


class Streams:
    """Starts, finds, takes over and expires streams. StreamProducer writes their entries, Stream serves their
    readers."""

    def __init__(
        self,
        generator: Generator,
        calls: Calls,
        store: StreamStore,
        *,
        policy: StreamPolicy,
        metrics: StreamMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generator = generator
        self._calls = calls
        self.store = store
        self.policy = policy
        self._metrics = metrics
        self._clock = clock
        self.restorers: dict[str, RequestRestorer] = {}
        self.known: dict[StreamKey, Stream] = {}
        self.local: dict[StreamKey, LocalStream] = {}
        self.running: dict[StreamKey, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self.follower = StreamFollower(
            store, self._awaited_streams, on_lost=self._lose_followed, on_taken_over=self._take_over
        )
        metrics.known.set_function(lambda: len(self.known))
        metrics.made.set_function(lambda: len(self.running))
        metrics.num_bytes.set_function(lambda: sum(stream.memory_bytes for stream in list(self.known.values())))
        metrics.readers.set_function(lambda: sum(stream.num_readers for stream in list(self.known.values())))

    @property
    def is_shared(self) -> bool:
        """Whether other frontends can read the streams."""
        return self.store.is_shared

    def register_restorers(self, restorers: Mapping[str, RequestRestorer]) -> None:
        """Registers parsers for stored requests, by kind of stream."""
        self.restorers |= restorers

    async def begin(self, stored: pb.KeptRequest, request: Request, writer: MessageWriter, call: Call) -> Stream:
        """Starts a stream that is independent of the call; the call's admission lease passes to it. Returns once the
        generation is submitted; raises the error for the client otherwise. `stored`: kind, body and retention; the
        other fields are filled in here."""
        with self._counting_refusals():
            return await self._begin(stored, request, writer, call)

    async def _begin(self, stored: pb.KeptRequest, request: Request, writer: MessageWriter, call: Call) -> Stream:
        """Creates the stream and starts its producer. The seed is fixed, so that another frontend can continue the
        stream, and the deadline is dropped. Returns when the producer has started, or raises its error."""
        check_resumable(request)
        seed = random.getrandbits(62) if request.sampling.seed is None else request.sampling.seed
        request = replace(request, deadline_s=None, sampling=replace(request.sampling, seed=seed))
        key = StreamKey(request.tenant if call.caller is None else call.caller.tenant, request.request_id)
        self._check_limits(key, call)
        stored.request_id, stored.tenant, stored.seed = key.request_id, key.tenant, seed
        stored.key_name = "" if call.caller is None else call.caller.key.name
        call.request = request
        stream = self.known[key] = Stream(key, stored, call.address)
        local = self._new_producer(stream, writer)
        task = self._start(local, self._produce(local, request, call.caller, call))
        await local.producer.started.wait()
        if task.done():
            task.result()
        return stream

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        """Counts a QuireError raised inside by its reason, if it concerns streams, and re-raises it."""
        try:
            yield
        except QuireError as error:
            if (reason := refusal_reason(error)) is not None:
                self._metrics.refused[reason].inc()
            raise

    def _check_limits(self, key: StreamKey, call: Call) -> None:
        """Raises QuireError if the id is taken or a limit is reached. Clients without a tenant share a tenant's limit
        per address."""
        known = self.known.get(key)
        if key in self.local or (known is not None and (not self.store.is_shared or self._is_awaited(known))):
            raise stream_exists(key)
        of_tenant = (stream for stream in self.known.values() if stream.key.tenant == key.tenant)
        count = sum(1 for stream in of_tenant if key.tenant or stream.address == call.address)
        if not self.store.is_shared or not key.tenant:
            self._check_count(count)
        self.policy.check_running(self._count_running(call))
        self.policy.check_memory("resumable", self.known.values())

    def _count_running(self, call: Call) -> int:
        """Returns the number of streams in progress here of the call's client: of its key's tenant, or, without a key,
        of its address, since a tenant that a client merely states may be a new one in every call."""
        running = (self.known[key] for key in self.running if key in self.known)
        if call.caller is not None:
            tenant = call.caller.tenant
            return sum(1 for stream in running if stream.request.key_name and stream.key.tenant == tenant)
        return sum(1 for stream in running if not stream.request.key_name and stream.address == call.address)

    def _check_count(self, count: int) -> None:
        """Raises ResourceExhausted if a limit on the number of streams is reached; used where the shared store does not
        count."""
        for bound, found in (("per_tenant", count), ("all_tenants", len(self.known))):
            if found >= getattr(self.policy.limits, bound):
                raise self.policy.full(bound)

    def _new_producer(self, stream: Stream, writer: MessageWriter, owner: str = "") -> LocalStream:
        """Registers the stream as local and returns it with its producer. `owner`: the lease already acquired; empty: a
        new owner id."""
        maker = StreamProducer(stream, self.store, self.policy, self._metrics, owner or uuid.uuid4().hex)
        self.local[stream.key] = local = LocalStream(stream, maker, writer)
        stream.unread_since_s = self._clock()
        return local

    def _start(self, local: LocalStream, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts the producer's task and lists the stream as running until it ends."""
        self.running[local.stream.key] = task = self._tasks.start("stream", work)
        task.add_done_callback(lambda _: self._ended(local))
        return task

    def _ended(self, local: LocalStream) -> None:
        """Handles the end of a producer's task: wakes begin(), and starts the stream's time without readers."""
        local.producer.started.set()  # releases begin(), which raises the task's error
        self.running.pop(local.stream.key, None)
        local.stream.unread_since_s = self._clock()

    async def _produce(self, local: LocalStream, request: Request, caller: Caller | None, outer: Call | None) -> None:
        """Runs the producer within a call of its own. `outer`: the call that started the stream; None for a stream
        taken over from another frontend."""
        with self._calls.begin() as call:
            call.route, call.caller, call.is_detached = f"stream {local.stream.kind}", caller, True
            call.status = "CANCELLED"
            if outer is not None:
                call.traceparent = outer.traceparent
                outer.lease.release()
            try:
                call.lease.acquire(1, 0)
                await local.producer.run(self._generator, call, request, local.writer, is_new=outer is not None)
                self._metrics.ended["failed" if call.error is not None else local.producer.outcome].inc()
                call.status = "OK" if call.error is None else transport(call.error).grpc_code.name
            except LeaseLost:
                self._on_lease_lost(local)
            except QuireError as error:
                call.error, call.status = error, transport(error).grpc_code.name
                await self._on_refused(local, error, is_new=outer is not None)
                if outer is not None:
                    raise
            except Exception as fault:
                call.error, call.status = Internal(type(fault).__name__), "INTERNAL"
                log.exception("a resumable stream failed", request=request.request_id)
                reported = Internal("internal error")
                await self._on_refused(local, reported, is_new=outer is not None)
                raise reported from None

    async def _on_refused(self, local: LocalStream, error: QuireError, *, is_new: bool) -> None:
        """Handles an error before the first message: a new stream does not start; one taken over is left to another
        frontend if the error is retryable here, else it ends with the error."""
        if is_new or isinstance(error, RETRYABLE):
            if not is_new:
                self._metrics.ended["elsewhere"].inc()
            await local.producer.release_lease()
            self._lose(local.stream, error)
            return
        try:
            await local.producer.fail(error, local.writer)
            self._metrics.ended["failed"].inc()
        except LeaseLost:
            self._on_lease_lost(local)

    def _on_lease_lost(self, local: LocalStream) -> None:
        """Turns a stream whose lease another frontend holds into a remote one. Readers follow the stored entries;
        readers that saw more than those get an error and must attach again."""
        stream = local.stream
        log.warning("another frontend has taken over a resumable stream", request=stream.key.request_id)
        if self.local.pop(stream.key, None) is not None:
            self._metrics.ended["elsewhere"].inc()
        if stream.num_visible > stream.num_stored:
            text = f"another frontend continues the stream: attach again from offset {stream.num_stored}"
            self._lose(stream, Unavailable(text, retry_after_ms=1))
        else:
            stream.drop_unstored()
            self.follower.wake()

    def forget(self, stream: Stream) -> None:
        """Drops the stream from this frontend's tables, unless another one has its key by now; the store keeps its
        entries."""
        if self.known.get(stream.key) is stream:
            del self.known[stream.key]
            self.local.pop(stream.key, None)

    async def attach(self, tenant: str, request_id: str) -> Stream:
        """Finds a stream for a reader and counts the attachment. Raises as find() does."""
        with self._counting_refusals():
            stream = await self.find(tenant, request_id)
        self._metrics.attaches.inc()
        return stream

    async def find(self, tenant: str, request_id: str) -> Stream:
        """Returns the stream of a tenant: one known here, else a remote one whose request is in the store. Raises
        NotFound if there is none or it was deleted, ResourceExhausted without memory, Unavailable if the store does not
        answer."""
        self.policy.check_offered("request_id")
        key = StreamKey(tenant, request_id)
        found = self.known.get(key)
        if found and key in self.local and found.has_ended and await self.is_deleted(tenant, request_id):
            self.forget(found)
            raise not_found(key, is_shared=True)
        if key not in self.known or self._may_be_deleted(self.known[key]):
            self.policy.check_memory("request_id", self.known.values())
            kept = await answer_of_store(self.store.request(key))
            if kept is None:
                if found is not None:  # a new stream may have started under this id meanwhile; it stays
                    self.forget(found)
                raise not_found(key, is_shared=self.store.is_shared)
            if key not in self.known:
                self.known[key] = Stream(key, parse_request(kept))
        return self.known[key]

    def _may_be_deleted(self, stream: Stream) -> bool:
        """Whether another frontend may have deleted the stream."""
        return self.store.is_shared and stream.has_ended and stream.key not in self.local

    async def is_deleted(self, tenant: str, request_id: str) -> bool:
        """Whether any frontend has deleted the stream; False if the store does not answer."""
        try:
            return await self.store.is_deleted(StreamKey(tenant, request_id))
        except StoreUnavailable:
            return False

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancels a stream; an ended stream stays as it is. Raises NotFound, Unavailable."""
        self.policy.check_offered("request_id")
        key = StreamKey(tenant, request_id)
        if key in self.local:
            self.local[key].producer.cancel()
        elif not await answer_of_store(self.store.cancel(key)):
            raise not_found(key, is_shared=self.store.is_shared)

    async def delete(self, stream: Stream) -> None:
        """Deletes an ended stream here and in the store. Raises FailedPrecondition while it runs, Unavailable."""
        if not stream.has_ended:
            raise FailedPrecondition(f"{stream.key.request_id!r} is still running: cancel it first", field="request_id")
        await answer_of_store(self.store.delete(stream.key))
        self.forget(stream)

    def reading(self, stream: Stream) -> AbstractContextManager[None]:
        """Counts a reader of the stream for the duration of the `with`."""
        return count_reader(stream, self.follower.wake, self._clock)

    def _awaited_streams(self) -> list[Stream]:
        return [stream for stream in self.known.values() if self._is_awaited(stream)]

    def _is_awaited(self, stream: Stream) -> bool:
        """Whether the stream has local readers that only get entries by polling the store."""
        return stream.num_readers > 0 and self._is_followed(stream)

    def _is_followed(self, stream: Stream) -> bool:
        """Whether the stream is remote and unfinished."""
        return stream.key not in self.local and not stream.has_ended

    def _lose(self, stream: Stream, error: QuireError) -> None:
        """Drops the stream here and ends its readers with the error; the store keeps the stream."""
        self.forget(stream)
        stream.fail(error)

    def _lose_followed(self, stream: Stream, error: QuireError) -> None:
        """Fails a remote stream; ignores a late answer about a stream that is produced here by now."""
        if self._is_followed(stream):
            self._lose(stream, error)

    def _take_over(self, stream: Stream, owner: str) -> None:
        """Continues a stream whose lease this frontend has acquired. If the stream was dropped or replaced meanwhile
        the lease just expires: no reader could find it."""
        if self.known.get(stream.key) is not stream:
            return
        self._metrics.takeovers.inc()
        local = self._new_producer(stream, NullMessageWriter(), owner)
        self._start(local, self._continue(local))

    async def refresh(self, stream: Stream) -> None:
        """Reads all stored entries of a remote stream, and takes it over if it has no producer. Raises the error of a
        stream that cannot be followed."""
        with self.reading(stream):
            while self._is_followed(stream) and await self.follower.poll([stream]):
                pass
        if stream.failure is not None:
            raise stream.failure

    async def _continue(self, local: LocalStream) -> None:
        """Restores the request of a taken-over stream and produces the rest of it."""
        stored = local.stream.request
        try:
            caller = self._calls.access.find_caller(stored.key_name, stored.tenant)
            request, writer = restore_request(self.restorers, stored)
        except QuireError as error:
            await self._on_refused(local, error, is_new=False)
            return
        sampling = replace(request.sampling, seed=stored.seed)
        request = replace(
            request, request_id=stored.request_id, tenant=stored.tenant, deadline_s=None, sampling=sampling
        )
        local = self.local[local.stream.key] = local._replace(writer=writer)
        await self._produce(local, request, caller, None)

    async def run_heartbeats(self) -> None:
        """Calls heartbeat() every HEARTBEAT_S until cancelled."""
        while True:
            await cancellable_sleep(HEARTBEAT_S)
            await self.heartbeat()

    async def heartbeat(self) -> None:
        """Renews the leases of local streams, reports their memory use, and expires unread streams."""
        leased = [local for local in self.local.values() if local.producer.needs_renewal]
        for start in range(0, len(leased), AT_ONCE):
            await asyncio.gather(*map(self._renew, leased[start : start + AT_ONCE]))
        await report_usage(self.store, self.local.values(), self._metrics)
        for stream in list(self.known.values()):
            self.expire(stream)

    async def _renew(self, local: LocalStream) -> None:
        """Renews the lease of a local stream; if another frontend holds it, stops the producer and makes the stream
        remote. Aborts a stream cancelled elsewhere."""
        try:
            await local.producer.renew()
        except LeaseLost:
            if (task := self.running.get(local.stream.key)) is not None:
                task.cancel()
            self._on_lease_lost(local)
        local.producer.abort_if_cancelled()

    def expire(self, stream: Stream) -> None:
        """Cancels a running stream that stays unread for its retention, unless its request runs unread. Drops an ended
        one then, or without readers as soon as the store has it whole; a remote one UNREAD_S after its last reader."""
        local = self.local.get(stream.key)
        unread_s = update_unread(stream, local, self._clock())
        has_expired = unread_s >= stream.request.retention_ms / 1000
        if stream.key in self.running:
            if has_expired and local is not None and not stream.request.runs_unread:
                local.producer.cancel("unread")
        elif local is None:
            if unread_s >= UNREAD_S:
                self.forget(stream)
        elif has_expired or is_stored_whole(stream, self.store):
            self.forget(stream)

    def tasks(self) -> list[Awaitable[None]]:
        """Returns the background tasks, to be run as long as the frontend runs."""
        followed = run_restarting("remote streams", self.follower.run)
        return [followed, run_restarting("leases of streams", self.run_heartbeats)]

    async def close(self) -> None:
        """Stops all producers and releases their leases, so that other frontends can continue the streams."""
        await self.follower.close()
        await self._tasks.close()
        await asyncio.gather(
            *(local.producer.release_lease() for local in self.local.values() if local.producer.needs_renewal)
        )
        await self.store.close()
