"""Routes of POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import Request
from starlette.responses import Response

from quire.services.frontend.http import headers
from quire.services.frontend.http.dialect import EVENTS
from quire.services.frontend.http.responses import DeferredResponse, keep_alive_comment
from quire.services.frontend.http.router import Router
from quire.services.frontend.offline.upload import boundary_of
from quire.services.frontend.openai_edge.answers.chunks import DONE, ErrorEvents, event
from quire.services.frontend.openai_edge.errors import plain_response
from quire.services.frontend.transcription.form import (
    AUTO,
    MAX_FORM_BYTES,
    SEGMENT,
    WORD,
    TranscriptionForm,
    read_form,
)
from quire.services.frontend.transcription.sound_memory import memory_of
from quire.services.frontend.transcription.work import TRANSCRIBE, TRANSLATE
from quire.shared.errors import InvalidArgument
from quire.shared.transcription.formats import FORMATS, as_json, as_srt, as_text, as_verbose_json, as_vtt
from quire.shared.transcription.transcript import Transcript

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from quire.services.frontend.calls.calls import Call
    from quire.services.frontend.generation.catalogue import Catalogue
    from quire.services.frontend.request.call_headers import CallHeaders
    from quire.services.frontend.transcription.transcription import Transcription

REALTIME = "/v1/realtime"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
JSON, TEXT, VTT = "application/json", "text/plain; charset=utf-8", "text/vtt; charset=utf-8"
TYPES = {"json": JSON, "verbose_json": JSON, "text": TEXT, "srt": TEXT, "vtt": VTT}
NO_TRANSCRIPT = Transcript([], "", "", 0.0)
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "model": {"type": "string"},
                        "language": {"type": "string"},
                        "prompt": {"type": "string"},
                        "hotwords": {"type": "string"},
                        "condition_on_previous_text": {"type": "boolean"},
                        "chunking_strategy": {"enum": [AUTO]},
                        "response_format": {"enum": [*FORMATS]},
                        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
                        "timestamp_granularities[]": {"type": "array", "items": {"enum": [SEGMENT, WORD]}},
                        "stream": {"type": "boolean"},
                        "seed": {"type": "integer"},
                        "max_completion_tokens": {"type": "integer", "minimum": 1},
                    },
                    "required": ["file"],
                }
            }
        },
    }
}


class TranscriptionRoutes:
    """Routes that turn sound files into text."""

    def __init__(self, transcription: Transcription, catalogue: Catalogue) -> None:
        self._transcription, self._catalogue = transcription, catalogue
        self.router = Router(tags=["audio"])
        for path, answer in ((TRANSCRIPTIONS, self.transcribe), (TRANSLATIONS, self.translate)):
            self.router.add_api_route(path, answer, methods=["POST"], response_class=Response, openapi_extra=FORM)
        self.router.add_api_route(REALTIME, self.realtime, methods=["GET"], response_class=Response)

    async def transcribe(self, http: Request) -> Response:
        """Returns the text of a sound file in the language that is spoken."""
        return UploadResponse(http, TRANSCRIBE, self._transcription, self._catalogue)

    async def translate(self, http: Request) -> Response:
        """Returns the text of a sound file in English."""
        return UploadResponse(http, TRANSLATE, self._transcription, self._catalogue)

    async def realtime(self) -> Response:
        """Answers a call that is no WebSocket, or of a server without the library for them."""
        text = f"{REALTIME}: open a WebSocket; a server needs `pip install websockets` for them"
        return plain_response(HTTPStatus.UPGRADE_REQUIRED, text, {"upgrade": "websocket"})


class UploadResponse(Response):
    """Answer of a call whose form is read once there is memory for its file, which is then held to the end."""

    def __init__(self, http: Request, task: str, transcription: Transcription, catalogue: Catalogue) -> None:
        """Raises InvalidArgument for another kind of body than a form."""
        super().__init__()
        self._boundary = boundary_of(http.headers.get("content-type", ""))
        self._task, self._transcription, self._catalogue = task, transcription, catalogue
        self._sent = headers.read(http)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads and checks the form and sends the answer. Raises InvalidArgument and Unimplemented that name the
        field, and DeadlineExceeded while it waits."""
        http = Request(scope, receive)
        num_bytes = min(int(http.headers.get("content-length", MAX_FORM_BYTES)), MAX_FORM_BYTES)
        tenant, deadline_s = self._sent.tenant, self._sent.deadline_s
        async with self._transcription.memory.held(memory_of(num_bytes), tenant, deadline_s):
            form = read_form(await _body(http), self._boundary)
            self._catalogue.check(form.model)
            self._transcription.check(form, self._task)
            answer = TranscriptStream if form.stream else TranscriptResponse
            await answer(self._transcription, form, self._task, self._sent)(scope, receive, send)


class TranscriptResponse(DeferredResponse):
    """Answer of a transcription, which ends with its call."""

    def __init__(self, transcription: Transcription, form: TranscriptionForm, task: str, sent: CallHeaders) -> None:
        super().__init__(TYPES[form.response_format], ErrorEvents())
        self._transcription, self._form, self._task, self._sent = transcription, form, task, sent

    async def respond(self, call: Call, send: Send) -> None:
        """Transcribes the file and sends its text in one piece."""
        transcript = await self._transcription.transcribe(self._form, self._task, self._sent, call)
        body = written(transcript, self._form)
        self.headers["content-length"] = str(len(body))
        await self._send_piece(body, send)
        await send({"type": "http.response.body", "body": b""})


class TranscriptStream(DeferredResponse):
    """Answer of a transcription whose text is sent piece by piece, in OpenAI's events."""

    def __init__(self, transcription: Transcription, form: TranscriptionForm, task: str, sent: CallHeaders) -> None:
        super().__init__(EVENTS, ErrorEvents(), keep_alive=keep_alive_comment)
        self._transcription, self._form, self._task, self._sent = transcription, form, task, sent

    async def respond(self, call: Call, send: Send) -> None:
        """Sends each piece's text, then the whole one."""
        transcript = NO_TRANSCRIPT
        async for more in self._transcription.growing(self._form, self._task, self._sent, call):
            if delta := more.text[len(transcript.text) :]:
                await self._send_piece(event({"type": "transcript.text.delta", "delta": delta}), send)
            transcript = more
        await self._send_piece(event({"type": "transcript.text.done", **as_json(transcript)}) + DONE, send)
        await send({"type": "http.response.body", "body": b""})


def written(transcript: Transcript, form: TranscriptionForm) -> bytes:
    """Returns a transcript in the format that a form asks for."""
    match form.response_format:
        case "text":
            return as_text(transcript).encode()
        case "srt":
            return as_srt(transcript, by_word=form.has_words).encode()
        case "vtt":
            return as_vtt(transcript, by_word=form.has_words).encode()
        case "verbose_json":
            answer: dict[str, Any] = as_verbose_json(
                transcript, has_words=form.has_words, has_segments=form.has_segments
            )
            return orjson.dumps(answer)
    return orjson.dumps(as_json(transcript))


async def _body(http: Request) -> bytes:
    """Reads a form's bytes. Raises InvalidArgument for more than MAX_FORM_BYTES, which are not kept."""
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in http.stream():
        num_bytes += len(chunk)
        if num_bytes > MAX_FORM_BYTES:
            raise InvalidArgument(
                "Maximum file size exceeded: a file has at most 25 MiB. Send a shorter one.", field="file"
            )
        chunks.append(chunk)
    return b"".join(chunks)
