"""Transcription as the edges use it: bounded in memory, and measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from quire.services.frontend.transcription.sound_memory import SoundMemory
from quire.services.frontend.transcription.transcriber import Transcriber
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.metrics.sound import SoundStatus
from quire.shared.transcription.transcript import Transcript

if TYPE_CHECKING:
    from quire.services.frontend.calls.calls import Call
    from quire.services.frontend.request.call_headers import CallHeaders
    from quire.services.frontend.transcription.form import TranscriptionForm


class Transcription:
    """The transcriber of a frontend whose model transcribes, and the memory that all edges share for it."""

    def __init__(self, transcriber: Transcriber, longest_s: float, metrics: FrontendMetrics) -> None:
        """Adds the metrics of sound to those of the frontend. `longest_s`: length of the longest sound that the model
        takes at once."""
        self._transcriber = transcriber
        self.longest_s = longest_s
        self.memory = SoundMemory()
        self.num_sessions = 0  # of /v1/realtime
        self._metrics = metrics.add_sound(self._status)

    def _status(self) -> SoundStatus:
        return SoundStatus(self.memory.held_bytes, self.memory.num_waiting, self.num_sessions)

    def check(self, form: TranscriptionForm, task: str) -> None:
        """Raises InvalidArgument as Transcriber.check()."""
        self._transcriber.check(form, task)

    async def transcribe(self, form: TranscriptionForm, task: str, sent: CallHeaders, call: Call) -> Transcript:
        """Returns the transcript of a form's file, and records it."""
        started_s = asyncio.get_running_loop().time()
        transcript = await self._transcriber.transcribe(form, task, sent, call)
        self._observe(form, transcript, started_s)
        return transcript

    async def growing(
        self, form: TranscriptionForm, task: str, sent: CallHeaders, call: Call
    ) -> AsyncIterator[Transcript]:
        """Yields the transcript of a growing part of the file, at last of all, which is recorded."""
        started_s = asyncio.get_running_loop().time()
        transcript: Transcript | None = None
        async for transcript in self._transcriber.growing(form, task, sent, call):
            yield transcript
        if transcript is not None:
            self._observe(form, transcript, started_s)

    async def glance(self, form: TranscriptionForm, task: str, sent: CallHeaders, call: Call) -> Transcript:
        """Returns the transcript of a window that will be read again, and does not record it."""
        return await self._transcriber.transcribe(form, task, sent, call)

    def _observe(self, form: TranscriptionForm, transcript: Transcript, started_s: float) -> None:
        segments = transcript.segments
        self._metrics.observe(
            transcript.seconds,
            asyncio.get_running_loop().time() - started_s,
            [(segment.start, segment.end) for segment in segments],
            0 if form.temperature else sum(segment.temperature > 0 for segment in segments),
        )
