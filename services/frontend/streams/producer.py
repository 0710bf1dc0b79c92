"""Makes one stream: a generation that no client holds, whose messages are kept before anybody reads them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from quire.services.frontend.calls.calls import Call
from quire.services.frontend.generation.generation import Aborted, Generation
from quire.services.frontend.generation.generator import Generator, Resume
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.outcome import Finish
from quire.services.frontend.request.request import Request
from quire.services.frontend.streams.delta_codec import decode_delta, encode_delta, restore_call_ids
from quire.services.frontend.streams.policy import StreamPolicy, stream_exists
from quire.services.frontend.streams.store import LeaseStatus, StoreFull, StoreUnavailable, StreamExists, StreamStore
from quire.services.frontend.streams.stream import Stream
from quire.shared.errors import FailedPrecondition, Internal, QuireError, Unavailable, to_proto
from quire.shared.logs import logger
from quire.shared.metrics.streams import StreamMetrics
from quire.shared.pb.common.v1.finish_pb2 import FINISH_REASON_CANCELLED
from quire.shared.pb.frontend.v1 import stream_pb2 as pb

log = logger("streams")

ORPHANED_MS = 5000  # beyond its retention: for whoever takes over from a maker that died


class MessageWriter(Protocol):
    """How the messages of one stream are written."""

    def messages(self, deltas: list[SampleDelta], generation: Generation) -> list[bytes]:
        """What is said about these."""

    def final_messages(self, generation: Generation) -> list[bytes]:
        """What is said once all samples have ended."""

    def error_messages(self, error: QuireError) -> list[bytes]:
        """What is said in place of the end; nothing where the edge has words of its own for errors."""


class LeaseLost(Exception):
    """Another frontend makes this stream."""


class StreamProducer:
    """Of one stream, for as long as it is made here."""

    def __init__(
        self, stream: Stream, store: StreamStore, policy: StreamPolicy, metrics: StreamMetrics, owner: str
    ) -> None:
        """`owner`: unique for each time that somebody begins."""
        self._stream = stream
        self._store = store
        self._policy = policy
        self._metrics = metrics
        self._owner = owner
        self._pending_deltas: list[pb.ResumableDelta] = []  # deltas without a message of their own
        self._keeping = asyncio.Lock()
        self._generation: Generation | None = None
        self._is_away = False
        self._is_cancelled = False
        self._reason = "cancelled"  # why, where it is
        self.outcome = "finished"  # as metrics call it
        self.started = asyncio.Event()
        self.has_lease = False
        self.has_remote_reader = False
        self.is_usage_final = False  # what it takes of the store, in the end

    @property
    def needs_renewal(self) -> bool:
        """It has something that others have to find, or goes on."""
        stream = self._stream
        return self.has_lease and not (stream.has_ended and stream.num_stored == len(stream.entries))

    async def release_lease(self) -> None:
        """Somebody else may go on."""
        with suppress(StoreUnavailable):
            await self._store.release_lease(self._stream.key, self._owner)

    async def run(
        self, generator: Generator, call: Call, request: Request, writer: MessageWriter, *, is_new: bool
    ) -> None:
        """To the end. Raises what keeps it from beginning, LeaseLost included; what happens later is the stream's end.
        `is_new`: no other frontend has begun it."""
        self.has_lease = not is_new
        try:
            async with generator.start(request, call, None if is_new else self._replay(writer)) as generation:
                self._generation = generation
                if is_new:
                    await self._create(generation)
                    self._metrics.begun.inc()  # though whoever asked for it may be gone by now
                self.started.set()
                await self._follow(generation, writer)
        except QuireError as error:
            if not self.started.is_set():
                raise
            call.error = error
            await self.fail(error, writer)
        except Exception as fault:
            if not self.started.is_set() or isinstance(fault, LeaseLost):
                raise
            call.error = Internal(type(fault).__name__)
            log.exception("a stream failed", request=request.request_id)
            await self.fail(Internal("internal error"), writer)
        finally:
            self._generation = None

    async def fail(self, error: QuireError, writer: MessageWriter) -> None:
        """Ends it. Raises LeaseLost."""
        said = writer.error_messages(error) if self._stream.entries else []
        end = pb.KeptEnd() if said else pb.KeptEnd(error=to_proto(error))
        await self._keep([*map(_message, said), pb.KeptMessage(end=end)])

    async def _create(self, generation: Generation) -> None:
        """Raises what the client should hear."""
        kept, key = self._stream.request, self._stream.key
        kept.prompt_digest = _digest(generation)
        try:
            await self._store.create(
                key, kept.SerializeToString(), self._owner, self.ttl_ms, self._policy.store_limits(key.tenant)
            )
        except StreamExists:
            raise stream_exists(key) from None
        except StoreFull as full:
            raise self._policy.full(full.bound) from None
        except StoreUnavailable:
            raise Unavailable(
                "resumable: Redis is away, where streams are kept; without resumable the request is served",
                field="resumable",
                retry_after_ms=1000,
            ) from None
        self.has_lease = True

    def _replay(self, writer: MessageWriter) -> Resume:
        def replay(generation: Generation) -> None:
            if _digest(generation) != self._stream.request.prompt_digest:
                raise FailedPrecondition("a stream cannot go on: its prompt has other tokens at this frontend")
            for entry in self._stream.entries:
                if entry.deltas:
                    again = [
                        restore_call_ids(delta, kept)
                        for kept in entry.deltas
                        for delta in generation.restore(decode_delta(kept))
                    ]
                    writer.messages(again, generation)

        return replay

    async def _follow(self, generation: Generation, writer: MessageWriter) -> None:
        try:
            async for deltas in generation:
                await self._tell(deltas, writer.messages(deltas, generation))
        except Aborted:
            if not self._is_cancelled:
                raise
            self.outcome = self._reason
            deltas = [
                SampleDelta(sample, [], "", [], Finish(FINISH_REASON_CANCELLED))
                for sample in generation.unfinished_samples
            ]
            await self._tell(deltas, writer.messages(deltas, generation))
        last = map(_message, writer.final_messages(generation))
        await self._keep([*last, pb.KeptMessage(end=pb.KeptEnd())])

    async def _tell(self, deltas: Sequence[SampleDelta], messages: Sequence[bytes]) -> None:
        """What belongs together is kept together: none of it, or all."""
        self._pending_deltas += map(encode_delta, deltas)
        if not messages:
            return
        entries = [*map(_message, messages)]
        entries[-1].deltas.extend(self._pending_deltas)
        self._pending_deltas.clear()
        self._policy.check_growth(self._stream, len(entries), sum(entry.ByteSize() for entry in entries))
        await self._keep(entries)
        if self._is_cancelled and self._generation is not None:
            self._generation.abort()

    async def _keep(self, entries: Iterable[pb.KeptMessage]) -> None:
        """Shows them once they are kept, or cannot be. Raises LeaseLost."""
        self._stream.append(entries)
        if self._is_away:
            self._stream.publish_all()
        else:
            await self.renew()

    async def renew(self) -> None:
        """Keeps what is not kept yet, and the lease. Raises LeaseLost."""
        async with self._keeping:
            stream = self._stream
            fresh = stream.entries[stream.num_stored :]
            is_last = bool(stream.entries) and stream.entries[-1].HasField("end")
            try:
                standing = await self._append(fresh, is_last)
                if not standing.exists:
                    standing = await self._keep_anew(is_last)
            except StoreUnavailable as away:
                self._tell_away(str(away))
                stream.publish_all()
                return
            if not standing.is_owner:
                raise LeaseLost
            self._tell_back()
            stream.mark_stored(stream.num_stored + len(fresh))
            self.has_remote_reader = standing.has_reader
            self._is_cancelled = self._is_cancelled or standing.is_cancelled

    async def _append(self, entries: Iterable[pb.KeptMessage], is_last: bool) -> LeaseStatus:
        written = [entry.SerializeToString() for entry in entries]
        place = self._stream.num_stored
        ttl_ms = self._ttl_ms(is_last)
        return await self._store.append(self._stream.key, self._owner, place, written, ttl_ms, is_last=is_last)

    async def _keep_anew(self, is_last: bool) -> LeaseStatus:
        """Redis has lost it, or a part of it."""
        stream = self._stream
        try:
            await self._store.create(
                stream.key, stream.request.SerializeToString(), self._owner, self._ttl_ms(is_last), None, overwrite=True
            )
        except StreamExists:
            return LeaseStatus(is_owner=False)
        kept, stream.num_stored = stream.num_stored, 0
        standing = await self._append(stream.entries[:kept], is_last=False)
        stream.num_stored = kept
        return await self._append(stream.entries[kept:], is_last) if standing.is_owner else standing

    @property
    def ttl_ms(self) -> int:
        """For so long from now on it is kept, if nothing more comes."""
        return self._ttl_ms(self._stream.has_ended)

    def _ttl_ms(self, is_last: bool) -> int:
        return self._stream.request.retention_ms + (0 if is_last else ORPHANED_MS)

    def _tell_away(self, reason: str) -> None:
        if not self._is_away:
            self._metrics.unkept.inc()
            log.warning("a stream goes on without being kept", request=self._stream.key.request_id, reason=reason)
        self._is_away = True

    def _tell_back(self) -> None:
        if self._is_away:
            log.info("a stream is kept again", request=self._stream.key.request_id)
        self._is_away = False

    def cancel(self, reason: str = "cancelled") -> None:
        """It ends with what it has told."""
        self._is_cancelled = True
        self._reason = reason
        self.abort_if_cancelled()

    def abort_if_cancelled(self) -> None:
        """Though nothing comes that could bring the news."""
        if self._is_cancelled and self._generation is not None:
            self._generation.abort()


def _digest(generation: Generation) -> bytes:
    return hashlib.sha256(generation.prepared[0].prompt_request.prompt).digest()


def _message(message: bytes) -> pb.KeptMessage:
    return pb.KeptMessage(message=message)
