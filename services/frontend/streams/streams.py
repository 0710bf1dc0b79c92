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
from quire.services.frontend.streams.following import Following
from quire.services.frontend.streams.made import Made, NoWords, Remake, remade
from quire.services.frontend.streams.maker import Deposed, Maker, MessageWriter
from quire.services.frontend.streams.store import StoreAway, StreamKey, StreamStore, StreamUse, parsed_request
from quire.services.frontend.streams.stream import Stream
from quire.services.frontend.streams.terms import StreamTerms, away, check, exists, not_found, refusal_reason
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
from quire.shared.process.supervision import Tasks, pause, restarted

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
        terms: StreamTerms,
        metrics: StreamMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generator = generator
        self._calls = calls
        self.store = store
        self.terms = terms
        self._metrics = metrics
        self._clock = clock
        self.remakes: dict[str, Remake] = {}
        self.found: dict[StreamKey, Stream] = {}
        self.made: dict[StreamKey, Made] = {}
        self.running: dict[StreamKey, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self.following = Following(store, self._wanted, lose=self._lose_followed, go_on=self._take_over)
        metrics.known.set_function(lambda: len(self.found))
        metrics.made.set_function(lambda: len(self.running))
        metrics.num_bytes.set_function(lambda: sum(stream.held_bytes for stream in list(self.found.values())))
        metrics.readers.set_function(lambda: sum(stream.num_readers for stream in list(self.found.values())))

    @property
    def is_shared(self) -> bool:
        """Other frontends have them as well."""
        return self.store.is_shared

    def offer(self, remakes: Mapping[str, Remake]) -> None:
        """Kinds of requests that can be gone on with here."""
        self.remakes |= remakes

    async def begin(self, kept: pb.KeptRequest, request: Request, writer: MessageWriter, call: Call) -> Stream:
        """Returns once it is on its way, with a life of its own; `call` gives its place to it. Raises what its client
        should hear instead. `kept`: kind, body and retention; the rest is the request's."""
        with self._counting_refusals():
            return await self._begin(kept, request, writer, call)

    async def _begin(self, kept: pb.KeptRequest, request: Request, writer: MessageWriter, call: Call) -> Stream:
        check(request)
        seed = random.getrandbits(62) if request.sampling.seed is None else request.sampling.seed
        request = replace(request, deadline_s=None, sampling=replace(request.sampling, seed=seed))
        key = StreamKey(_tenant(call.caller, request.tenant), request.request_id)
        self._check_room(key, call.address)
        kept.request_id, kept.tenant, kept.seed = key.request_id, key.tenant, seed
        kept.key_name = "" if call.caller is None else call.caller.key.name
        call.request = request
        stream = self.found[key] = Stream(key, kept, call.address)
        made = self._new_maker(stream, writer)
        task = self._start(made, self._make(made, request, call.caller, call))
        await made.maker.begun.wait()
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
        found = self.found.get(key)
        if key in self.made or (found is not None and (not self.store.is_shared or self._is_awaited(found))):
            raise exists(key)
        of_tenant = (found for found in self.found.values() if found.key.tenant == key.tenant)
        own = sum(1 for found in of_tenant if key.tenant or found.address == address)
        if not self.store.is_shared or not key.tenant:
            self._check_count(own)
        self.terms.check_memory("resumable", self.found.values())

    def _check_count(self, own: int) -> None:
        """Where nobody else counts; the bytes are frontend_bytes here."""
        for bound, found in (("per_tenant", own), ("all_tenants", len(self.found))):
            if found >= getattr(self.terms.limits, bound):
                raise self.terms.full(bound)

    def _new_maker(self, stream: Stream, writer: MessageWriter, owner: str = "") -> Made:
        maker = Maker(stream, self.store, self.terms, self._metrics, owner or uuid.uuid4().hex)
        self.made[stream.key] = made = Made(stream, maker, writer)
        stream.quiet_since_s = self._clock()
        return made

    def _start(self, made: Made, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.running[made.stream.key] = task = self._tasks.start("stream", work)
        task.add_done_callback(lambda _: self._ended(made))
        return task

    def _ended(self, made: Made) -> None:
        made.maker.begun.set()  # whoever waits for it hears how it ended
        self.running.pop(made.stream.key, None)
        made.stream.quiet_since_s = self._clock()

    async def _make(self, made: Made, request: Request, caller: Caller | None, outer: Call | None) -> None:
        """`outer`: the call that began it; None for a stream that another frontend began."""
        with self._calls.begin() as call:
            call.route, call.caller, call.is_detached = f"stream {made.stream.kind}", caller, True
            call.status = "CANCELLED"
            if outer is not None:
                call.traceparent = outer.traceparent
                outer.lease.release()
            try:
                call.lease.take(1, 0)
                await made.maker.run(self._generator, call, request, made.writer, is_new=outer is not None)
                self._metrics.ended["failed" if call.error is not None else made.maker.ending].inc()
                call.status = "OK" if call.error is None else transport(call.error).grpc_code.name
            except Deposed:
                self._deposed(made)
            except QuireError as error:
                call.error, call.status = error, transport(error).grpc_code.name
                await self._refused(made, error, is_new=outer is not None)
                if outer is not None:
                    raise
            except Exception as fault:
                call.error, call.status = Internal(type(fault).__name__), "INTERNAL"
                log.exception("a stream failed", request=request.request_id)
                told = Internal("internal error")
                await self._refused(made, told, is_new=outer is not None)
                raise told from None

    async def _refused(self, made: Made, error: QuireError, *, is_new: bool) -> None:
        """It does not begin, or what another frontend began cannot go on here: at all, or now."""
        if is_new or isinstance(error, PASSING):
            if not is_new:
                self._metrics.ended["elsewhere"].inc()
            await made.maker.leave()
            self._lose(made.stream, error)
            return
        try:
            await made.maker.fail(error, made.writer)
            self._metrics.ended["failed"].inc()
        except Deposed:
            self._deposed(made)

    def _deposed(self, made: Made) -> None:
        """It goes on elsewhere: its readers go on with what is kept there, unless they have read on."""
        stream = made.stream
        log.warning("another frontend goes on with a stream", request=stream.key.request_id)
        if self.made.pop(stream.key, None) is not None:
            self._metrics.ended["elsewhere"].inc()
        if stream.num_shown > stream.num_kept:
            again = f"the stream goes on elsewhere: attach again from offset {stream.num_kept} on"
            self._lose(stream, Unavailable(again, retry_after_ms=1))
        else:
            stream.cut()
            self.following.look_soon()

    def forget(self, stream: Stream) -> None:
        if self.found.get(stream.key) is stream:
            del self.found[stream.key]
            self.made.pop(stream.key, None)

    async def attach(self, tenant: str, request_id: str) -> Stream:
        """To be read from some message on. Raises as find() does."""
        with self._counting_refusals():
            stream = await self.find(tenant, request_id)
        self._metrics.attaches.inc()
        return stream

    async def find(self, tenant: str, request_id: str) -> Stream:
        """Raises NotFound where the tenant has none such, Unavailable where nobody can say."""
        self.terms.check_offered("request_id")
        key = StreamKey(tenant, request_id)
        found = self.found.get(key)
        if found and key in self.made and found.has_ended and await self.is_deleted(tenant, request_id):
            self.forget(found)
            raise not_found(key, is_shared=True)
        if key not in self.found or self._may_be_deleted(self.found[key]):
            self.terms.check_memory("request_id", self.found.values())
            kept = await self._asked(self.store.request(key))
            if kept is None:
                if found is not None:  # whatever has begun under its id meanwhile stays
                    self.forget(found)
                raise not_found(key, is_shared=self.store.is_shared)
            if key not in self.found:
                self.found[key] = Stream(key, parsed_request(kept))
        return self.found[key]

    def _may_be_deleted(self, stream: Stream) -> bool:
        """By another frontend."""
        return self.store.is_shared and stream.has_ended and stream.key not in self.made

    async def is_deleted(self, tenant: str, request_id: str) -> bool:
        """By whichever frontend, as far as anybody knows."""
        try:
            return await self.store.is_deleted(StreamKey(tenant, request_id))
        except StoreAway:
            return False

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Raises NotFound, Unavailable. What has ended stays as it is."""
        self.terms.check_offered("request_id")
        key = StreamKey(tenant, request_id)
        if key in self.made:
            self.made[key].maker.cancel()
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
        except StoreAway:
            raise away() from None

    @contextmanager
    def reading(self, stream: Stream) -> Iterator[None]:
        """Around every reader."""
        stream.num_readers += 1
        self.following.look_soon()
        try:
            yield
        finally:
            stream.num_readers -= 1
            stream.quiet_since_s = self._clock()

    def _wanted(self) -> list[Stream]:
        return [stream for stream in self.found.values() if self._is_awaited(stream)]

    def _is_awaited(self, stream: Stream) -> bool:
        """Who reads it here hears only what is looked for."""
        return stream.num_readers > 0 and self._is_followed(stream)

    def _is_followed(self, stream: Stream) -> bool:
        return stream.key not in self.made and not stream.has_ended

    def _lose(self, stream: Stream, error: QuireError) -> None:
        self.forget(stream)
        stream.lose(error)

    def _lose_followed(self, stream: Stream, error: QuireError) -> None:
        """An answer that is older than its being made here says nothing of it."""
        if self._is_followed(stream):
            self._lose(stream, error)

    def _take_over(self, stream: Stream, owner: str) -> None:
        """Nobody else makes it any more. Where it was lost or replaced meanwhile its lease runs out again: made here it
        would be found by nobody."""
        if self.found.get(stream.key) is not stream:
            return
        self._metrics.takeovers.inc()
        made = self._new_maker(stream, NoWords(), owner)
        self._start(made, self._go_on(made))

    async def bring_up_to_date(self, stream: Stream) -> None:
        """A look counts as a reader, here as elsewhere; where nobody makes it any more, it is gone on with."""
        with self.reading(stream):
            while self._is_followed(stream) and await self.following.look([stream]):
                pass
        if stream.loss is not None:
            raise stream.loss

    async def _go_on(self, made: Made) -> None:
        kept = made.stream.request
        try:
            caller = self._calls.access.going_on(kept.key_name, kept.tenant)
            request, writer = remade(self.remakes, kept)
        except QuireError as error:
            await self._refused(made, error, is_new=False)
            return
        sampling = replace(request.sampling, seed=kept.seed)
        request = replace(request, request_id=kept.request_id, tenant=kept.tenant, deadline_s=None, sampling=sampling)
        made = self.made[made.stream.key] = made._replace(writer=writer)
        await self._make(made, request, caller, None)

    async def keep_alive(self) -> None:
        """Renews leases and forgets what nobody wants, until cancelled."""
        while True:
            await pause(HEARTBEAT_S)
            await self.beat()

    async def beat(self) -> None:
        """Once."""
        leased = [made for made in self.made.values() if made.maker.has_to_renew]
        for start in range(0, len(leased), AT_ONCE):
            await asyncio.gather(*map(self._renew, leased[start : start + AT_ONCE]))
        await self._tell_use()
        for stream in list(self.found.values()):
            self.age(stream)

    async def _tell_use(self) -> None:
        """What is made here, for the bounds over all that are kept; of what has ended once more."""
        told = [made for made in self.made.values() if not made.maker.is_told]
        uses = [StreamUse(made.stream.key, made.stream.held_bytes, made.maker.keep_ms) for made in told]
        ended = [made for made in told if not made.maker.has_to_renew and made.stream.has_ended]
        with suppress(StoreAway):
            total = await self.store.tell(uses)
            for made in ended:
                made.maker.is_told = True
            self._metrics.of_all.set(total.num_streams)
            self._metrics.bytes_of_all.set(total.num_bytes)

    async def _renew(self, made: Made) -> None:
        try:
            await made.maker.renew()
        except Deposed:
            if (task := self.running.get(made.stream.key)) is not None:
                task.cancel()
            self._deposed(made)
        made.maker.end_if_cancelled()

    def age(self, stream: Stream) -> None:
        """Ends what nobody reads, and forgets what has ended, after its retention."""
        now, made = self._clock(), self.made.get(stream.key)
        if stream.num_readers or stream.quiet_since_s is None or (made is not None and made.maker.is_read_elsewhere):
            stream.quiet_since_s = now
        quiet_s = now - stream.quiet_since_s
        is_over = quiet_s >= stream.request.retention_ms / 1000
        if stream.key in self.running:
            if is_over and made is not None and not stream.request.runs_unread:
                made.maker.cancel("unread")
        elif made is None:
            if quiet_s >= UNREAD_S:
                self.forget(stream)
        elif is_over or (self.store.is_shared and stream.num_kept == len(stream.entries) and not stream.num_readers):
            self.forget(stream)

    def tasks(self) -> list[Awaitable[None]]:
        """To be run as long as the frontend runs."""
        followed = restarted("streams made elsewhere", self.following.run)
        return [followed, restarted("leases of streams", self.keep_alive)]

    async def close(self) -> None:
        """What is made here may go on elsewhere."""
        await self.following.close()
        await self._tasks.close()
        await asyncio.gather(*(made.maker.leave() for made in self.made.values() if made.maker.has_to_renew))
        await self.store.close()


def _tenant(caller: Caller | None, said: str) -> str:
    return said if caller is None else caller.tenant
