"""The resumable streams of a frontend: those that are made here, and those made elsewhere that are read here."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

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
    check_resumable,
    not_found,
    refusal_reason,
    store_unavailable,
    stream_exists,
)
from quire.services.frontend.streams.producer import LeaseLost, MessageWriter, StreamProducer
from quire.services.frontend.streams.store import StoreUnavailable, StreamKey, StreamStore, StreamUsage, parse_request
from quire.services.frontend.streams.stream import Stream
from quire.shared.errors import (
    FailedPrecondition,
    Internal,
    QuireError,
    ResourceExhausted,
    Unavailable,
    transport,
)
from quire.shared.logs import logger
from quire.shared.metrics.streams import StreamMetrics
from quire.shared.pb.frontend.v1 import stream_pb2 as pb
from quire.shared.process.supervision import Tasks, cancellable_sleep, run_restarting

log = logger("streams")

HEARTBEAT_S = 1.0  # a third of a lease
AT_ONCE = 64  # heartbeats in flight
UNREAD_S = 10.0  # after which what others make is forgotten here
PASSING = (Unavailable, ResourceExhausted)


Result = TypeVar("Result")


class Streams:
    """Begins, finds, takes over, forgets. What a stream says is its maker's business, how it is read its own."""

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
        self.follower = StreamFollower(store, self._wanted, on_lost=self._lose_followed, on_taken_over=self._take_over)
        metrics.known.set_function(lambda: len(self.known))
        metrics.made.set_function(lambda: len(self.running))
        metrics.num_bytes.set_function(lambda: sum(stream.memory_bytes for stream in list(self.known.values())))
        metrics.readers.set_function(lambda: sum(stream.num_readers for stream in list(self.known.values())))

    @property
    def is_shared(self) -> bool:
        """Other frontends have them as well."""
        return self.store.is_shared

    def register_restorers(self, restorers: Mapping[str, RequestRestorer]) -> None:
        """Kinds of requests that can be gone on with here."""
        self.restorers |= restorers

    async def begin(self, kept: pb.KeptRequest, request: Request, writer: MessageWriter, call: Call) -> Stream:
        """Returns once it is on its way, with a life of its own; `call` gives its place to it. Raises what its client
        should hear instead. `kept`: kind, body and retention; the rest is the request's."""
        with self._counting_refusals():
            return await self._begin(kept, request, writer, call)

    async def _begin(self, kept: pb.KeptRequest, request: Request, writer: MessageWriter, call: Call) -> Stream:
        check_resumable(request)
        seed = random.getrandbits(62) if request.sampling.seed is None else request.sampling.seed
        request = replace(request, deadline_s=None, sampling=replace(request.sampling, seed=seed))
        key = StreamKey(_tenant(call.caller, request.tenant), request.request_id)
        self._check_room(key, call.address)
        kept.request_id, kept.tenant, kept.seed = key.request_id, key.tenant, seed
        kept.key_name = "" if call.caller is None else call.caller.key.name
        call.request = request
        stream = self.known[key] = Stream(key, kept, call.address)
        local = self._new_maker(stream, writer)
        task = self._start(local, self._make(local, request, call.caller, call))
        await local.producer.started.wait()
        if task.done():
            task.result()
        return stream

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except QuireError as error:
            if (reason := refusal_reason(error)) is not None:
                self._metrics.refused[reason].inc()
            raise

    def _check_room(self, key: StreamKey, address: str) -> None:
        """Clients without a name share the bound of a tenant by address."""
        found = self.known.get(key)
        if key in self.local or (found is not None and (not self.store.is_shared or self._is_awaited(found))):
            raise stream_exists(key)
        of_tenant = (found for found in self.known.values() if found.key.tenant == key.tenant)
        own = sum(1 for found in of_tenant if key.tenant or found.address == address)
        if not self.store.is_shared or not key.tenant:
            self._check_count(own)
        self.policy.check_memory("resumable", self.known.values())

    def _check_count(self, own: int) -> None:
        """Where nobody else counts; the bytes are frontend_bytes here."""
        for bound, found in (("per_tenant", own), ("all_tenants", len(self.known))):
            if found >= getattr(self.policy.limits, bound):
                raise self.policy.full(bound)

    def _new_maker(self, stream: Stream, writer: MessageWriter, owner: str = "") -> LocalStream:
        maker = StreamProducer(stream, self.store, self.policy, self._metrics, owner or uuid.uuid4().hex)
        self.local[stream.key] = local = LocalStream(stream, maker, writer)
        stream.unread_since_s = self._clock()
        return local

    def _start(self, local: LocalStream, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.running[local.stream.key] = task = self._tasks.start("stream", work)
        task.add_done_callback(lambda _: self._ended(local))
        return task

    def _ended(self, local: LocalStream) -> None:
        local.producer.started.set()  # whoever waits for it hears how it ended
        self.running.pop(local.stream.key, None)
        local.stream.unread_since_s = self._clock()

    async def _make(self, local: LocalStream, request: Request, caller: Caller | None, outer: Call | None) -> None:
        """`outer`: the call that began it; None for a stream that another frontend began."""
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
                self._deposed(local)
            except QuireError as error:
                call.error, call.status = error, transport(error).grpc_code.name
                await self._refused(local, error, is_new=outer is not None)
                if outer is not None:
                    raise
            except Exception as fault:
                call.error, call.status = Internal(type(fault).__name__), "INTERNAL"
                log.exception("a stream failed", request=request.request_id)
                told = Internal("internal error")
                await self._refused(local, told, is_new=outer is not None)
                raise told from None

    async def _refused(self, local: LocalStream, error: QuireError, *, is_new: bool) -> None:
        """It does not begin, or what another frontend began cannot go on here: at all, or now."""
        if is_new or isinstance(error, PASSING):
            if not is_new:
                self._metrics.ended["elsewhere"].inc()
            await local.producer.release_lease()
            self._lose(local.stream, error)
            return
        try:
            await local.producer.fail(error, local.writer)
            self._metrics.ended["failed"].inc()
        except LeaseLost:
            self._deposed(local)

    def _deposed(self, local: LocalStream) -> None:
        """It goes on elsewhere: its readers go on with what is kept there, unless they have read on."""
        stream = local.stream
        log.warning("another frontend goes on with a stream", request=stream.key.request_id)
        if self.local.pop(stream.key, None) is not None:
            self._metrics.ended["elsewhere"].inc()
        if stream.num_visible > stream.num_stored:
            again = f"the stream goes on elsewhere: attach again from offset {stream.num_stored} on"
            self._lose(stream, Unavailable(again, retry_after_ms=1))
        else:
            stream.drop_unstored()
            self.follower.wake()

    def forget(self, stream: Stream) -> None:
        if self.known.get(stream.key) is stream:
            del self.known[stream.key]
            self.local.pop(stream.key, None)

    async def attach(self, tenant: str, request_id: str) -> Stream:
        """To be read from some message on. Raises as find() does."""
        with self._counting_refusals():
            stream = await self.find(tenant, request_id)
        self._metrics.attaches.inc()
        return stream

    async def find(self, tenant: str, request_id: str) -> Stream:
        """Raises NotFound where the tenant has none such, Unavailable where nobody can say."""
        self.policy.check_offered("request_id")
        key = StreamKey(tenant, request_id)
        found = self.known.get(key)
        if found and key in self.local and found.has_ended and await self.is_deleted(tenant, request_id):
            self.forget(found)
            raise not_found(key, is_shared=True)
        if key not in self.known or self._may_be_deleted(self.known[key]):
            self.policy.check_memory("request_id", self.known.values())
            kept = await self._asked(self.store.request(key))
            if kept is None:
                if found is not None:  # whatever has begun under its id meanwhile stays
                    self.forget(found)
                raise not_found(key, is_shared=self.store.is_shared)
            if key not in self.known:
                self.known[key] = Stream(key, parse_request(kept))
        return self.known[key]

    def _may_be_deleted(self, stream: Stream) -> bool:
        """By another frontend."""
        return self.store.is_shared and stream.has_ended and stream.key not in self.local

    async def is_deleted(self, tenant: str, request_id: str) -> bool:
        """By whichever frontend, as far as anybody knows."""
        try:
            return await self.store.is_deleted(StreamKey(tenant, request_id))
        except StoreUnavailable:
            return False

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Raises NotFound, Unavailable. What has ended stays as it is."""
        self.policy.check_offered("request_id")
        key = StreamKey(tenant, request_id)
        if key in self.local:
            self.local[key].producer.cancel()
        elif not await self._asked(self.store.cancel(key)):
            raise not_found(key, is_shared=self.store.is_shared)

    async def delete(self, stream: Stream) -> None:
        """What has ended. Raises Unavailable; FailedPrecondition while it is under way."""
        if not stream.has_ended:
            raise FailedPrecondition(f"{stream.key.request_id!r} is under way: cancel it first", field="request_id")
        await self._asked(self.store.delete(stream.key))
        self.forget(stream)

    @staticmethod
    async def _asked(question: Awaitable[Result]) -> Result:
        try:
            return await question
        except StoreUnavailable:
            raise store_unavailable() from None

    @contextmanager
    def reading(self, stream: Stream) -> Iterator[None]:
        """Around every reader."""
        stream.num_readers += 1
        self.follower.wake()
        try:
            yield
        finally:
            stream.num_readers -= 1
            stream.unread_since_s = self._clock()

    def _wanted(self) -> list[Stream]:
        return [stream for stream in self.known.values() if self._is_awaited(stream)]

    def _is_awaited(self, stream: Stream) -> bool:
        """Who reads it here hears only what is looked for."""
        return stream.num_readers > 0 and self._is_followed(stream)

    def _is_followed(self, stream: Stream) -> bool:
        return stream.key not in self.local and not stream.has_ended

    def _lose(self, stream: Stream, error: QuireError) -> None:
        self.forget(stream)
        stream.fail(error)

    def _lose_followed(self, stream: Stream, error: QuireError) -> None:
        """An answer that is older than its being made here says nothing of it."""
        if self._is_followed(stream):
            self._lose(stream, error)

    def _take_over(self, stream: Stream, owner: str) -> None:
        """Nobody else makes it any more. Where it was lost or replaced meanwhile its lease runs out again: made here it
        would be found by nobody."""
        if self.known.get(stream.key) is not stream:
            return
        self._metrics.takeovers.inc()
        local = self._new_maker(stream, NullMessageWriter(), owner)
        self._start(local, self._go_on(local))

    async def refresh(self, stream: Stream) -> None:
        """A look counts as a reader, here as elsewhere; where nobody makes it any more, it is gone on with."""
        with self.reading(stream):
            while self._is_followed(stream) and await self.follower.poll([stream]):
                pass
        if stream.failure is not None:
            raise stream.failure

    async def _go_on(self, local: LocalStream) -> None:
        kept = local.stream.request
        try:
            caller = self._calls.access.find_caller(kept.key_name, kept.tenant)
            request, writer = restore_request(self.restorers, kept)
        except QuireError as error:
            await self._refused(local, error, is_new=False)
            return
        sampling = replace(request.sampling, seed=kept.seed)
        request = replace(request, request_id=kept.request_id, tenant=kept.tenant, deadline_s=None, sampling=sampling)
        local = self.local[local.stream.key] = local._replace(writer=writer)
        await self._make(local, request, caller, None)

    async def run_heartbeats(self) -> None:
        """Renews leases and forgets what nobody wants, until cancelled."""
        while True:
            await cancellable_sleep(HEARTBEAT_S)
            await self.heartbeat()

    async def heartbeat(self) -> None:
        """Once."""
        leased = [local for local in self.local.values() if local.producer.needs_renewal]
        for start in range(0, len(leased), AT_ONCE):
            await asyncio.gather(*map(self._renew, leased[start : start + AT_ONCE]))
        await self._tell_use()
        for stream in list(self.known.values()):
            self.expire(stream)

    async def _tell_use(self) -> None:
        """What is made here, for the bounds over all that are kept; of what has ended once more."""
        told = [local for local in self.local.values() if not local.producer.is_usage_final]
        uses = [StreamUsage(local.stream.key, local.stream.memory_bytes, local.producer.ttl_ms) for local in told]
        ended = [local for local in told if not local.producer.needs_renewal and local.stream.has_ended]
        with suppress(StoreUnavailable):
            total = await self.store.report_usage(uses)
            for local in ended:
                local.producer.is_usage_final = True
            self._metrics.of_all.set(total.num_streams)
            self._metrics.bytes_of_all.set(total.num_bytes)

    async def _renew(self, local: LocalStream) -> None:
        try:
            await local.producer.renew()
        except LeaseLost:
            if (task := self.running.get(local.stream.key)) is not None:
                task.cancel()
            self._deposed(local)
        local.producer.abort_if_cancelled()

    def expire(self, stream: Stream) -> None:
        """Ends what nobody reads, and forgets what has ended, after its retention."""
        now, local = self._clock(), self.local.get(stream.key)
        if (
            stream.num_readers
            or stream.unread_since_s is None
            or (local is not None and local.producer.has_remote_reader)
        ):
            stream.unread_since_s = now
        quiet_s = now - stream.unread_since_s
        is_over = quiet_s >= stream.request.retention_ms / 1000
        if stream.key in self.running:
            if is_over and local is not None and not stream.request.runs_unread:
                local.producer.cancel("unread")
        elif local is None:
            if quiet_s >= UNREAD_S:
                self.forget(stream)
        elif is_over or (self.store.is_shared and stream.num_stored == len(stream.entries) and not stream.num_readers):
            self.forget(stream)

    def tasks(self) -> list[Awaitable[None]]:
        """To be run as long as the frontend runs."""
        followed = run_restarting("streams made elsewhere", self.follower.run)
        return [followed, run_restarting("leases of streams", self.run_heartbeats)]

    async def close(self) -> None:
        """What is made here may go on elsewhere."""
        await self.follower.close()
        await self._tasks.close()
        await asyncio.gather(
            *(local.producer.release_lease() for local in self.local.values() if local.producer.needs_renewal)
        )
        await self.store.close()


def _tenant(caller: Caller | None, said: str) -> str:
    return said if caller is None else caller.tenant
