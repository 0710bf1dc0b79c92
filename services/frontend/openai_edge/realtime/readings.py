"""Readings of windows of sound by the model, each a call of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from quire.services.frontend.access.access import Caller
from quire.services.frontend.calls.calls import Call, Calls
from quire.services.frontend.openai_edge.realtime.options import SessionOptions
from quire.services.frontend.openai_edge.routes.transcription_routes import REALTIME
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.transcription.form import TranscriptionForm
from quire.services.frontend.transcription.live import LiveUtterance, samples_of
from quire.services.frontend.transcription.transcription import Transcription
from quire.services.frontend.transcription.work import TRANSCRIBE
from quire.shared.errors import QuireError, ResourceExhausted, transport
from quire.shared.media.audio.wav import float_wav
from quire.shared.transcription.transcript import Transcript

QUICK = 1e-6  # temperature: as good as greedy, and not tried again where the text is doubtful


class Readings:
    """Reads the utterances of one session's client."""

    def __init__(self, transcription: Transcription, calls: Calls, caller: Caller | None, tenant: str) -> None:
        """`caller`: by the API key; `tenant`: of sessions without keys."""
        self._transcription, self._calls = transcription, calls
        self._caller = caller
        self._tenant = tenant if caller is None else caller.tenant

    def check(self, options: SessionOptions) -> None:
        """Raises InvalidArgument for a language that the model does not have."""
        self._transcription.check(TranscriptionForm(b"", language=options.language), TRANSCRIBE)

    def utterance(self, options: SessionOptions) -> LiveUtterance:
        """Returns a new utterance with these options."""
        language = options.language

        async def read(sound: bytes, is_final: bool) -> Transcript | None:
            """Transcribes a window. The language of the first words is kept, so that it does not change in the middle
            of a sentence. Readings that are not final are left out while the server is full."""
            nonlocal language
            form = TranscriptionForm(
                float_wav(samples_of(sound), options.rate),
                model=options.model,
                language=language,
                prompt=options.prompt,
                temperature=0.0 if is_final else QUICK,
            )
            try:
                transcript = await self._transcribe(form, is_final=is_final)
            except ResourceExhausted:
                if is_final:
                    raise
                return None
            if transcript.text:
                language = transcript.language
            return transcript

        return LiveUtterance(read, options.rate, self._transcription.longest_s)

    async def _transcribe(self, form: TranscriptionForm, *, is_final: bool) -> Transcript:
        with self._call(is_final=is_final) as call:
            await call.admit()
            sent = CallHeaders(uuid.uuid4().hex, self._tenant, None, asyncio.get_running_loop().time())
            read = self._transcription.transcribe if is_final else self._transcription.glance
            return await read(form, TRANSCRIBE, sent, call)

    @contextmanager
    def _call(self, *, is_final: bool) -> Iterator[Call]:
        """Yields the call of one reading. Only final ones are logged."""
        with self._calls.begin() as call:
            call.caller = self._caller
            call.route = f"WS {REALTIME}" if is_final else ""
            try:
                yield call
                call.status = "200"
            except QuireError as error:
                call.error, call.status = error, str(transport(error).http_status)
                raise
