"""InferenceService.Transcribe: a stream of a file's bytes in, a stream of its text out."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

from quire.services.frontend.calls.calls import Call
from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.grpc_edge import transcription_messages
from quire.services.frontend.grpc_edge.errors import Context
from quire.services.frontend.grpc_edge.requests import Arrival, tenant
from quire.services.frontend.grpc_edge.stalled_streams import with_timeout
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.transcription.sound_memory import memory_of
from quire.services.frontend.transcription.transcription import Transcription
from quire.shared.errors import InvalidArgument, Unimplemented
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.transcription.transcript import Transcript

MIB = 1 << 20
MOST_FILE_BYTES = 64 * MIB
NO_TRANSCRIPT = Transcript([], "", "", 0.0)
Messages = AsyncIterator[pb.TranscribeRequest]


class TranscriptionCalls:
    """Answers Transcribe calls; without a model that transcribes it refuses them."""

    def __init__(self, transcription: Transcription | None, catalogue: Catalogue, stalled_s: float) -> None:
        """Stores the collaborators. `stalled_s`: time after which a client that sends nothing is refused."""
        self._transcription, self._catalogue, self._stalled_s = transcription, catalogue, stalled_s

    async def answer(self, messages: Messages, arrival: Arrival, call: Call, context: Context) -> None:
        """Reads the file and writes its text as it is computed. Raises InvalidArgument for a file or options that are
        refused, before the whole file is read where possible; DeadlineExceeded if the client stops sending."""
        messages = with_timeout(messages, self._stalled_s)
        first = await anext(messages, None)
        if first is None or not first.HasField("options"):
            raise InvalidArgument("options: the first message must have the options", field="options")
        if self._transcription is None:
            raise Unimplemented(
                f"model: {self._catalogue.name} does not transcribe; serve one of Whisper's", field="model"
            )
        options = first.options
        self._check(options)
        memory, owner = self._transcription.memory, tenant(options.tenant, arrival, call)
        num_bytes = min(options.content_bytes or MOST_FILE_BYTES, MOST_FILE_BYTES)
        async with memory.held(memory_of(num_bytes), owner, arrival.deadline_s):
            content = await _content(messages, options.content_bytes)
            timeout_s = None if arrival.deadline_s is None else arrival.deadline_s - arrival.arrival_s
            sent = CallHeaders(options.request_id or uuid.uuid4().hex, owner, timeout_s, arrival.arrival_s)
            await self._write(options, content, sent, call, context)

    def _check(self, options: pb.TranscriptionOptions) -> None:
        """Raises QuireError for options that are not accepted, whatever the file."""
        assert self._transcription is not None
        self._catalogue.check(options.model)
        if options.content_bytes > MOST_FILE_BYTES:
            raise _too_large()
        form = transcription_messages.form_of(options, b"")
        self._transcription.check(form, transcription_messages.task_of(options))

    async def _write(
        self, options: pb.TranscriptionOptions, content: bytes, sent: CallHeaders, call: Call, context: Context
    ) -> None:
        """Transcribes the file and writes a message for each piece or few pieces; the last one has the summary."""
        assert self._transcription is not None
        form, task = transcription_messages.form_of(options, content), transcription_messages.task_of(options)
        before = NO_TRANSCRIPT
        async for transcript in self._transcription.growing(form, task, sent, call):
            if transcript.segments or transcript.text:
                await context.write(transcription_messages.increment(sent.request_id or "", before, transcript))
            before = transcript
        await context.write(transcription_messages.ending(sent.request_id or "", before))


async def _content(messages: Messages, announced: int) -> bytes:
    """Returns the file. Raises InvalidArgument for one that is empty, too large, or of another size than announced, and
    for messages without content."""
    pieces: list[bytes] = []
    num_bytes, most = 0, announced or MOST_FILE_BYTES
    async for message in messages:
        if not message.content:
            raise InvalidArgument("content: every message after the first must have content", field="content")
        num_bytes += len(message.content)
        if num_bytes > MOST_FILE_BYTES:
            raise _too_large()
        if num_bytes > most:
            break
        pieces.append(message.content)
    if announced and num_bytes != announced:
        found = f"more than {announced}" if num_bytes > announced else str(num_bytes)
        text = f"content_bytes: {announced} were announced, {found} received"
        raise InvalidArgument(text, field="content_bytes")
    if not num_bytes:
        raise InvalidArgument(
            "content: the stream has no sound file; send its bytes after the options", field="content"
        )
    return b"".join(pieces)


def _too_large() -> InvalidArgument:
    text = f"Maximum file size exceeded: content has at most {MOST_FILE_BYTES // MIB} MiB. Send a shorter file."
    return InvalidArgument(text, field="content")
