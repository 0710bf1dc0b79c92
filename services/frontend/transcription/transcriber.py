"""Transcribes sound files with Whisper: finds the speech, decodes its pieces in parallel or one conditioned on the
other, and reads again what the model has left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from quire.services.frontend.transcription.model_calls import ModelCalls
from quire.services.frontend.transcription.piece_decoder import PieceDecoder
from quire.services.frontend.transcription.reading import Reading
from quire.services.frontend.transcription.word_aligner import WordAligner
from quire.services.frontend.transcription.work import ENGLISH, TRANSLATE, TranscriptionWork
from quire.shared.errors import InvalidArgument
from quire.shared.transcription.joining import joined
from quire.shared.transcription.silence import Piece, speech_level, spoken_pieces
from quire.shared.transcription.timestamps import WhisperVocabulary
from quire.shared.transcription.transcript import Transcript

if TYPE_CHECKING:
    from quire.services.frontend.calls.calls import Call
    from quire.services.frontend.generation.generator import Generator
    from quire.services.frontend.request.call_headers import CallHeaders
    from quire.services.frontend.tokenizer.tokenizer import Tokenizer
    from quire.services.frontend.transcription.form import TranscriptionForm
    from quire.shared.media.audio.waveform import F32

SEARCH_PART = 6  # a cut lies in the last sixth of a piece
MOST_AT_ONCE = 8  # stretches of a stream


class SoundFiles(Protocol):
    """Decoder of sound files for a model that transcribes."""

    @property
    def rate(self) -> int:
        """Samples a second that the model takes."""

    @property
    def max_samples(self) -> int:
        """Samples of the longest piece that the model takes."""

    async def samples(self, content: bytes) -> F32:
        """Returns the samples of a file at `rate`. Raises InvalidArgument for a file that cannot be decoded."""


class Transcriber:
    """Transcribes files with the served model, one of Whisper's."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, files: SoundFiles) -> None:
        """Reads the vocabulary. Raises InvalidArgument for a tokenizer that is not one of Whisper."""
        self._files = files
        self._vocabulary = WhisperVocabulary.of(tokenizer.added_tokens)
        calls = ModelCalls(generator)
        self._decoder = PieceDecoder(calls, tokenizer, self._vocabulary)
        self._aligner = WordAligner(calls, self._decoder, self._vocabulary)

    def check(self, form: TranscriptionForm, task: str) -> None:
        """Raises InvalidArgument for a language or a task that the model does not have."""
        known = self._vocabulary.languages
        if task == TRANSLATE and not known:
            text = "model: it has English only and cannot translate; send the file to /v1/audio/transcriptions"
            raise InvalidArgument(text, field="model")
        if form.language and form.language not in (known or {ENGLISH: 0}):
            shown = ", ".join(sorted(known or [ENGLISH]))
            text = f"language: {form.language!r:.64} is not a language of this model; it has {shown}"
            raise InvalidArgument(text, field="language")

    async def transcribe(self, form: TranscriptionForm, task: str, sent: CallHeaders, call: Call) -> Transcript:
        """Returns the transcript of a form's file; it ends with its deadline, and if its client disconnects. Raises
        QuireError."""
        work, readings = await self._prepare(form, task, sent, call)
        async for _ in self._rounds(work, readings):
            pass
        return self._transcript(work, readings)

    async def growing(
        self, form: TranscriptionForm, task: str, sent: CallHeaders, call: Call
    ) -> AsyncIterator[Transcript]:
        """Yields the transcript of a growing part of the file, at last of all. The first stretch is transcribed alone,
        so that its text comes early, then as many as are transcribed, up to MOST_AT_ONCE. Raises as transcribe()."""
        work, readings = await self._prepare(form, task, sent, call)
        done = 0
        while done < len(readings):
            count = min(max(1, done), MOST_AT_ONCE)
            async for _ in self._rounds(work, readings[done : done + count]):
                yield self._transcript(work, readings)
            done += count
        if not readings:
            yield self._transcript(work, readings)

    async def _prepare(
        self, form: TranscriptionForm, task: str, sent: CallHeaders, call: Call
    ) -> tuple[TranscriptionWork, list[Reading]]:
        """Decodes the file and returns the readings of its speech, with the language of the first one unless the form
        names it."""
        samples, rate = await self._files.samples(form.content), self._files.rate
        work = TranscriptionWork(form, task, sent, call, samples, rate, form.language)
        longest_s = self._files.max_samples / rate
        pieces, level = await asyncio.to_thread(_speech, samples, rate, longest_s)
        work = replace(work, level=level)
        if not self._vocabulary.languages:
            work = replace(work, language=ENGLISH)
        elif pieces and not form.language:
            work = replace(work, language=await self._decoder.language(work, pieces[0]))
        spans = _spans(pieces)
        groups = [spans] if form.condition_on_previous_text and spans else [[span] for span in spans]
        text, time_token = self._decoder.text, self._vocabulary.token_of
        return work, [Reading(work, group, longest_s, text, time_token) for group in groups]

    async def _rounds(self, work: TranscriptionWork, readings: Sequence[Reading]) -> AsyncIterator[None]:
        """Decodes the next piece of each reading in parallel, yields, and repeats this until all are finished."""
        while active := [reading for reading in readings if not reading.is_finished]:
            asked = [reading.request() for reading in active]
            spoken = await self._decoder.decode_pieces(work, asked)
            if work.form.has_words:
                spoken = await self._aligner.with_words(work, [one.piece for one in asked], spoken)
            for reading, request, text in zip(active, asked, spoken, strict=True):
                reading.advance(request, text)
            yield

    def _transcript(self, work: TranscriptionWork, readings: Sequence[Reading]) -> Transcript:
        """Returns the transcript up to the first reading that is not finished."""
        spoken = []
        for reading in readings:
            spoken += reading.spoken
            if not reading.is_finished:
                break
        segments = [segment for piece in spoken for segment in piece.segments]
        text = joined((piece.text for piece in spoken), work.written_language)
        return Transcript(segments, text, work.language, len(work.samples) / work.rate, work.task)


def _speech(samples: F32, rate: int, longest_s: float) -> tuple[list[Piece], float]:
    """Returns the pieces of sound that may be speech, and the level that the rest does not exceed."""
    return spoken_pieces(samples, rate, longest_s, longest_s / SEARCH_PART), speech_level(samples, rate)


def _spans(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins pieces whose border is in the middle of speech: they are read one after the other."""
    numbers, number = [], 0
    for piece in pieces:
        numbers.append(number)
        number += not piece.is_cut
    groups = (list(group) for _, group in groupby(zip(numbers, pieces, strict=True), key=lambda pair: pair[0]))
    return [Piece(group[0][1].start, group[-1][1].end) for group in groups]
