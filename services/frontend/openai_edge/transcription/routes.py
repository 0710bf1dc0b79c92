"""Routes of POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
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
from quire.services.frontend.openai_edge.transcription.form import (
    AUTO,
    MAX_FORM_BYTES,
    SEGMENT,
    WORD,
    TranscriptionForm,
    read_form,
)
from quire.services.frontend.openai_edge.transcription.transcriber import Transcriber
from quire.services.frontend.openai_edge.transcription.work import TRANSCRIBE, TRANSLATE
from quire.shared.errors import InvalidArgument
from quire.shared.transcription.formats import FORMATS, as_json, as_srt, as_text, as_verbose_json, as_vtt
from quire.shared.transcription.transcript import Transcript

if TYPE_CHECKING:
    from starlette.types import Send

    from quire.services.frontend.calls.calls import Call
    from quire.services.frontend.generation.catalogue import Catalogue
    from quire.services.frontend.http.headers import CallHeaders

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
JSON, TEXT, VTT = "application/json", "text/plain; charset=utf-8", "text/vtt; charset=utf-8"
TYPES = {"json": JSON, "verbose_json": JSON, "text": TEXT, "srt": TEXT, "vtt": VTT}
NO_TRANSCRIPT = Transcript([], "", "", 0.0)
MAX_FORMS = 8  # that are read and decoded at the same time; further callers wait
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

    def __init__(self, transcriber: Transcriber, catalogue: Catalogue) -> None:
        self._transcriber, self._catalogue = transcriber, catalogue
        self._places = asyncio.Semaphore(MAX_FORMS)
        self.router = Router(tags=["audio"])
        for path, answer in ((TRANSCRIPTIONS, self.transcribe), (TRANSLATIONS, self.translate)):
            self.router.add_api_route(path, answer, methods=["POST"], response_class=Response, openapi_extra=FORM)

    async def transcribe(self, http: Request) -> Response:
        """Returns the text of a sound file in the language that is spoken."""
        return await self._answer(http, TRANSCRIBE)

    async def translate(self, http: Request) -> Response:
        """Returns the text of a sound file in English."""
        return await self._answer(http, TRANSLATE)

    async def _answer(self, http: Request, task: str) -> Response:
        """Reads and checks the form. Raises InvalidArgument and Unimplemented that name the field."""
        async with self._places:
            form = read_form(await _body(http), boundary_of(http.headers.get("content-type", "")))
        self._catalogue.check(form.model)
        self._transcriber.check(form, task)
        answer = TranscriptStream if form.stream else TranscriptResponse
        return answer(self._transcriber, form, task, headers.read(http))


class TranscriptResponse(DeferredResponse):
    """Answer of a transcription, which ends with its call."""

    def __init__(self, transcriber: Transcriber, form: TranscriptionForm, task: str, sent: CallHeaders) -> None:
        super().__init__(TYPES[form.response_format], ErrorEvents())
        self._transcriber, self._form, self._task, self._sent = transcriber, form, task, sent

    async def respond(self, call: Call, send: Send) -> None:
        """Transcribes the file and sends its text in one piece."""
        transcript = await self._transcriber.transcribe(self._form, self._task, self._sent, call)
        body = written(transcript, self._form)
        self.headers["content-length"] = str(len(body))
        await self._send_piece(body, send)
        await send({"type": "http.response.body", "body": b""})


class TranscriptStream(DeferredResponse):
    """Answer of a transcription whose text is sent piece by piece, in OpenAI's events."""

    def __init__(self, transcriber: Transcriber, form: TranscriptionForm, task: str, sent: CallHeaders) -> None:
        super().__init__(EVENTS, ErrorEvents(), keep_alive=keep_alive_comment)
        self._transcriber, self._form, self._task, self._sent = transcriber, form, task, sent

    async def respond(self, call: Call, send: Send) -> None:
        """Sends each piece's text, then the whole one."""
        transcript = NO_TRANSCRIPT
        async for more in self._transcriber.growing(self._form, self._task, self._sent, call):
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
