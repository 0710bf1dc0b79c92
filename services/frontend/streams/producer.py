"""Produces one resumable stream: runs a generation detached from any client and stores each message before readers see
it."""

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

ORPHANED_MS = 5000  # kept beyond the retention, so that another frontend can take over from a dead producer


class MessageWriter(Protocol):
    """Writes the messages of one stream, in the form of the edge that received the request."""

    def messages(self, deltas: list[SampleDelta], generation: Generation) -> list[bytes]:
        """Returns the messages for these deltas."""

    def final_messages(self, generation: Generation) -> list[bytes]:
        """Returns the messages sent after all samples have ended."""

    def error_messages(self, error: QuireError) -> list[bytes]:
        """Returns the messages that replace the normal end; empty if the edge reports errors otherwise."""


class LeaseLost(Exception):
    """Another frontend holds the lease of this stream and produces it."""


class StreamProducer:
    """Produces one stream while this frontend holds its lease: runs the generation and stores every message."""

    def __init__(
        self, stream: Stream, store: StreamStore, policy: StreamPolicy, metrics: StreamMetrics, owner: str
    ) -> None:
        """Stores the collaborators. `owner`: lease owner id, unique for every start of a producer."""
        self._stream = stream
        self._store = store
        self._policy = policy
        self._metrics = metrics
        self._owner = owner
        self._pending_deltas: list[pb.ResumableDelta] = []  # deltas not yet attached to a message
        self._store_lock = asyncio.Lock()
        self._generation: Generation | None = None
        self._is_store_down = False
        self._is_cancelled = False
        self._reason = "cancelled"  # why the stream was cancelled
        self.outcome = "finished"  # label of the metric
        self.started = asyncio.Event()
        self.has_lease = False
        self.has_remote_reader = False
        self.is_usage_final = False  # the final memory use has been reported to the store

    @property
    def needs_renewal(self) -> bool:
        """Whether the lease must be renewed: the stream runs, or has entries not yet stored."""
        stream = self._stream
        return self.has_lease and not (stream.has_ended and stream.num_stored == len(stream.entries))

    async def release_lease(self) -> None:
        """Releases the lease, so that another frontend may continue the stream."""
        with suppress(StoreUnavailable):
            await self._store.release_lease(self._stream.key, self._owner)

    async def run(
        self, generator: Generator, call: Call, request: Request, writer: MessageWriter, *, is_new: bool
    ) -> None:
        """Runs the generation to its end. Raises errors that prevent the start, and LeaseLost; later errors become the
        end of the stream. `is_new`: False if another frontend started the stream and this one continues it."""
        self.has_lease = not is_new
        try:
            async with generator.start(request, call, None if is_new else self._resume(writer)) as generation:
                self._generation = generation
                if is_new:
                    await self._create(generation)
                    self._metrics.begun.inc()  # even if the client has already disconnected
                self.started.set()
                await self._produce(generation, writer)
        except QuireError as error:
            if not self.started.is_set():
                raise
            call.error = error
            await self.fail(error, writer)
        except Exception as fault:
            if not self.started.is_set() or isinstance(fault, LeaseLost):
                raise
            call.error = Internal(type(fault).__name__)
            log.exception("a resumable stream failed", request=request.request_id)
            await self.fail(Internal("internal error"), writer)
        finally:
            self._generation = None

    async def fail(self, error: QuireError, writer: MessageWriter) -> None:
        """Ends the stream with an error: by the writer's messages if entries exist and it has such messages, else by an
        end entry with the error. Raises LeaseLost."""
        messages = writer.error_messages(error) if self._stream.entries else []
        end = pb.KeptEnd() if messages else pb.KeptEnd(error=to_proto(error))
        await self._add_entries([*map(_message, messages), pb.KeptMessage(end=end)])

    async def _create(self, generation: Generation) -> None:
        """Creates the stream in the store with the digest of its prompt, and so acquires the lease. Raises the
        QuireError that the client gets."""
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
                "resumable: Redis, which stores resumable streams, is unavailable; send the request without resumable",
                field="resumable",
                retry_after_ms=1000,
            ) from None
        self.has_lease = True

    def _resume(self, writer: MessageWriter) -> Resume:
        """Returns a callback that restores the stored deltas into a new generation and its message writer."""

        def resume(generation: Generation) -> None:
            """Restores all stored entries into the generation and the writer. Raises FailedPrecondition if the prompt
            has other tokens here."""
            if _digest(generation) != self._stream.request.prompt_digest:
                raise FailedPrecondition(
                    "the stream cannot be continued: this frontend tokenizes its prompt differently; give all "
                    "frontends the same model folder"
                )
            for entry in self._stream.entries:
                if entry.deltas:
                    deltas = [
                        restore_call_ids(delta, kept)
                        for kept in entry.deltas
                        for delta in generation.restore(decode_delta(kept))
                    ]
                    writer.messages(deltas, generation)

        return resume

    async def _produce(self, generation: Generation, writer: MessageWriter) -> None:
        """Stores the messages of each batch of deltas, then the final messages and the end entry; the samples of a
        cancelled stream end as cancelled."""
        try:
            async for deltas in generation:
                await self._store_deltas(deltas, writer.messages(deltas, generation))
        except Aborted:
            if not self._is_cancelled:
                raise
            self.outcome = self._reason
            deltas = [
                SampleDelta(sample, [], "", [], Finish(FINISH_REASON_CANCELLED))
                for sample in generation.unfinished_samples
            ]
            await self._store_deltas(deltas, writer.messages(deltas, generation))
        last = map(_message, writer.final_messages(generation))
        await self._add_entries([*last, pb.KeptMessage(end=pb.KeptEnd())])

    async def _store_deltas(self, deltas: Sequence[SampleDelta], messages: Sequence[bytes]) -> None:
        """Stores the messages together with their deltas in one append: all of them or none; deltas without a message
        wait for the next one. Aborts a cancelled generation. Raises ResourceExhausted beyond the stream's limits,
        LeaseLost."""
        self._pending_deltas += map(encode_delta, deltas)
        if not messages:
            return
        entries = [*map(_message, messages)]
        entries[-1].deltas.extend(self._pending_deltas)
        self._pending_deltas.clear()
        self._policy.check_growth(self._stream, len(entries), sum(entry.ByteSize() for entry in entries))
        await self._add_entries(entries)
        if self._is_cancelled and self._generation is not None:
            self._generation.abort()

    async def _add_entries(self, entries: Iterable[pb.KeptMessage]) -> None:
        """Appends entries and makes them visible once they are stored, or at once if the store is unavailable. Raises
        LeaseLost."""
        self._stream.append(entries)
        if self._is_store_down:
            self._stream.publish_all()
        else:
            await self.renew()

    async def renew(self) -> None:
        """Renews the lease and stores the entries not yet stored; while the store is unavailable they become visible
        without it. Raises LeaseLost."""
        async with self._store_lock:
            stream = self._stream
            unstored = stream.entries[stream.num_stored :]
            is_last = bool(stream.entries) and stream.entries[-1].HasField("end")
            try:
                status = await self._append(unstored, is_last)
                if not status.exists:
                    status = await self._store_again(is_last)
            except StoreUnavailable as error:
                self._note_store_down(str(error))
                stream.publish_all()
                return
            if not status.is_owner:
                raise LeaseLost
            self._note_store_up()
            stream.mark_stored(stream.num_stored + len(unstored))
            self.has_remote_reader = status.has_reader
            self._is_cancelled = self._is_cancelled or status.is_cancelled

    async def _append(self, entries: Iterable[pb.KeptMessage], is_last: bool) -> LeaseStatus:
        """Appends entries after the stored ones and renews the lease. `is_last`: they contain the end. Raises
        StoreUnavailable."""
        written = [entry.SerializeToString() for entry in entries]
        place = self._stream.num_stored
        ttl_ms = self._ttl_ms(is_last)
        return await self._store.append(self._stream.key, self._owner, place, written, ttl_ms, is_last=is_last)

    async def _store_again(self, is_last: bool) -> LeaseStatus:
        """Stores the whole stream again after Redis has lost it or part of it; returns the state after the last append.
        `is_last`: the entries contain the end."""
        stream = self._stream
        try:
            await self._store.create(
                stream.key, stream.request.SerializeToString(), self._owner, self._ttl_ms(is_last), None, overwrite=True
            )
        except StreamExists:
            return LeaseStatus(is_owner=False)
        num_stored, stream.num_stored = stream.num_stored, 0
        status = await self._append(stream.entries[:num_stored], is_last=False)
        stream.num_stored = num_stored
        return await self._append(stream.entries[num_stored:], is_last) if status.is_owner else status

    @property
    def ttl_ms(self) -> int:
        """Milliseconds for which the store keeps the stream if nothing more is appended."""
        return self._ttl_ms(self._stream.has_ended)

    def _ttl_ms(self, is_last: bool) -> int:
        return self._stream.request.retention_ms + (0 if is_last else ORPHANED_MS)

    def _note_store_down(self, reason: str) -> None:
        """Counts and logs, at the first failure only, that the stream continues in this process without being
        stored."""
        if not self._is_store_down:
            self._metrics.unkept.inc()
            log.warning(
                "a resumable stream continues without being stored", request=self._stream.key.request_id, reason=reason
            )
        self._is_store_down = True

    def _note_store_up(self) -> None:
        if self._is_store_down:
            log.info("a resumable stream is stored again", request=self._stream.key.request_id)
        self._is_store_down = False

    def cancel(self, reason: str = "cancelled") -> None:
        """Cancels the generation; the stream ends with the messages produced so far."""
        self._is_cancelled = True
        self._reason = reason
        self.abort_if_cancelled()

    def abort_if_cancelled(self) -> None:
        """Aborts the generation if the stream was cancelled elsewhere, without waiting for its next token."""
        if self._is_cancelled and self._generation is not None:
            self._generation.abort()


def _digest(generation: Generation) -> bytes:
    """Returns the SHA-256 of the prompt's token ids."""
    return hashlib.sha256(generation.prepared[0].prompt_request.prompt).digest()


def _message(message: bytes) -> pb.KeptMessage:
    return pb.KeptMessage(message=message)
