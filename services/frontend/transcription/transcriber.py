"""Transcribes sound files with Whisper: cuts them at silence, transcribes the pieces in parallel, and doubtful ones
again at higher temperatures."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.services.frontend.request.request import Request, Sampling, TokenPrompt
from quire.shared.errors import InvalidArgument
from quire.shared.media.audio.wav import float_wav
from quire.shared.media.modalities import AUDIO
from quire.shared.transcription.joining import joined
from quire.shared.transcription.quality import TEMPERATURES, QualityRules, compression_ratio
from quire.shared.transcription.silence import Piece, spoken_pieces
from quire.shared.transcription.timestamps import WhisperVocabulary, segments_of
from quire.shared.transcription.transcript import Segment, Transcript

if TYPE_CHECKING:
    from quire.services.frontend.calls.calls import Call
    from quire.services.frontend.generation.generator import Generator
    from quire.services.frontend.output_processor.delta import SampleDelta
    from quire.services.frontend.request.call_headers import CallHeaders
    from quire.services.frontend.tokenizer.tokenizer import Tokenizer
    from quire.services.frontend.transcription.form import TranscriptionForm
    from quire.shared.media.audio.waveform import F32

TRANSCRIBE, TRANSLATE, ENGLISH = "transcribe", "translate", "en"
ORIGIN = PartOrigin("file", "", "file")
SEARCH_PART = 6  # a cut lies in the last sixth of a piece
MOST_PROMPT_TOKENS = 223  # of the text before: half of the decoder's context, as in the model's training
MOST_AT_ONCE = 8  # pieces of a stream
RULES = QualityRules()
NEVER = -100.0  # logit bias


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


class _Spoken(NamedTuple):
    """Result of one piece, of one attempt."""

    segments: list[Segment]
    text: str
    avg_logprob: float
    is_accepted: bool


@dataclass(frozen=True, slots=True)
class _Transcription:
    """Values of one transcription that all of its steps read."""

    form: TranscriptionForm
    task: str
    sent: CallHeaders
    call: Call
    samples: F32
    language: str  # ISO 639 code; empty: not known, or a model that knows only English


class Transcriber:
    """Transcribes files with the served model, one of Whisper's."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, files: SoundFiles) -> None:
        """Reads the vocabulary. Raises InvalidArgument for a tokenizer that is not one of Whisper."""
        self._generator, self._tokenizer, self._files = generator, tokenizer, files
        self._vocabulary = WhisperVocabulary.of(tokenizer.added_tokens)

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
        work, pieces = await self._prepare(form, task, sent, call)
        return self._transcript(work, await self._transcribe_pieces(work, pieces))

    async def growing(
        self, form: TranscriptionForm, task: str, sent: CallHeaders, call: Call
    ) -> AsyncIterator[Transcript]:
        """Yields the transcript of a growing number of pieces, at last of all. The first piece is transcribed alone, so
        that its text comes early, then as many as are transcribed, up to MOST_AT_ONCE. Raises as transcribe()."""
        work, pieces = await self._prepare(form, task, sent, call)
        spoken: list[_Spoken] = []
        while len(spoken) < len(pieces):
            count = min(max(1, len(spoken)), MOST_AT_ONCE)
            spoken += await self._transcribe_pieces(work, pieces[len(spoken) : len(spoken) + count])
            yield self._transcript(work, spoken)
        if not pieces:
            yield self._transcript(work, spoken)

    async def _prepare(
        self, form: TranscriptionForm, task: str, sent: CallHeaders, call: Call
    ) -> tuple[_Transcription, list[Piece]]:
        """Decodes the file and returns its pieces, with the language of the first one unless the form names it."""
        work = _Transcription(form, task, sent, call, await self._files.samples(form.content), form.language)
        pieces = await asyncio.to_thread(self._spoken, work.samples)
        if pieces and self._vocabulary.languages and not form.language:
            work = replace(work, language=await self._detect(work, pieces[0]))
        return work, pieces

    def _transcript(self, work: _Transcription, spoken: Sequence[_Spoken]) -> Transcript:
        segments = [segment for piece in spoken for segment in piece.segments]
        language = work.language or ("" if self._vocabulary.languages else ENGLISH)
        written = ENGLISH if work.task == TRANSLATE else language
        text = joined((piece.text for piece in spoken), written)
        return Transcript(segments, text, language, len(work.samples) / self._files.rate, work.task)

    def _spoken(self, samples: F32) -> list[Piece]:
        """Returns the pieces of the sound that are not silent, without the silence around them."""
        rate, longest_s = self._files.rate, self._files.max_samples / self._files.rate
        return spoken_pieces(samples, rate, longest_s, longest_s / SEARCH_PART)

    async def _detect(self, work: _Transcription, piece: Piece) -> str:
        """Returns the language of a piece: the most likely token of a language after the start."""
        languages = self._vocabulary.languages
        sampling = Sampling(temperature=0.0, max_tokens=1, allowed_token_ids=sorted(languages.values()))
        (delta,) = await self._run(work, [self._prompt(work, piece, [self._vocabulary.start])], sampling)
        names = {token: name for name, token in languages.items()}
        return names.get(delta.token_ids[0], "") if delta.token_ids else ""

    async def _transcribe_pieces(self, work: _Transcription, pieces: Sequence[Piece]) -> list[_Spoken]:
        """Transcribes pieces in parallel; those whose text is a repetition or a guess are tried again, each time at the
        next temperature. If none is accepted, the best one is taken."""
        found: dict[Piece, _Spoken] = {}
        left = list(pieces)
        given = work.form.temperature
        for number, temperature in enumerate([given] if given else TEMPERATURES):
            if number == 1:
                left = await self._without_silence(work, left, found)
            if not left:
                break
            prompts = [self._prompt(work, piece, self._beginning(work)) for piece in left]
            deltas = await self._run(work, prompts, self._sampling(work, temperature))
            for piece, delta in zip(left, deltas, strict=True):
                read = self._read(work, piece, delta, temperature)
                found[piece] = max(found.get(piece, read), read, key=_worth)
            left = [piece for piece in left if not found[piece].is_accepted]
        return [found[piece] for piece in pieces]

    async def _without_silence(
        self, work: _Transcription, pieces: Sequence[Piece], found: dict[Piece, _Spoken]
    ) -> list[Piece]:
        """Returns the pieces of doubtful text in which the model thinks that there is speech. The others, such as music
        and noise, have no text from now on in `found`."""
        token = self._vocabulary.no_speech
        if token is None or not pieces:
            return list(pieces)
        sampling = Sampling(temperature=0.0, max_tokens=1, logprob_token_ids=[token])
        prompts = [self._prompt(work, piece, [self._vocabulary.start]) for piece in pieces]
        deltas = await self._run(work, prompts, sampling)
        left = []
        for piece, delta in zip(pieces, deltas, strict=True):
            likely = math.exp(dict(delta.logprobs[0].top).get(token, -math.inf)) if delta.logprobs else 0.0
            if RULES.is_silence(found[piece].avg_logprob, likely):
                found[piece] = _Spoken([], "", 0.0, True)
            else:
                left.append(piece)
        return left

    def _sampling(self, work: _Transcription, temperature: float) -> Sampling:
        form = work.form
        # A model that may write time stamps must not decide against them.
        bias = {self._vocabulary.no_timestamps: NEVER} if form.has_times else {}
        return Sampling(
            temperature=temperature, seed=form.seed, max_tokens=form.max_tokens, logprobs=0, logit_bias=bias
        )

    def _beginning(self, work: _Transcription) -> list[int]:
        """Returns the tokens that a decoder continues: the client's text, start, language, task, and whether there are
        time stamps."""
        known, form = self._vocabulary, work.form
        tokens: list[int] = []
        if form.prompt and known.previous is not None:
            before = self._tokenizer.encode_plainly(f" {form.prompt.strip()}")
            tokens += [known.previous, *before[-MOST_PROMPT_TOKENS:]]
        tokens.append(known.start)
        if known.languages and work.language:
            tokens.append(known.languages[work.language])
        task = known.translate if work.task == TRANSLATE else known.transcribe
        if known.languages and task is not None:
            tokens.append(task)
        return tokens if form.has_times else [*tokens, known.no_timestamps]

    def _prompt(self, work: _Transcription, piece: Piece, tokens: Sequence[int]) -> TokenPrompt:
        content = float_wav(work.samples[piece.start : piece.end], self._files.rate)
        return TokenPrompt(tokens, [MediaPart(content=content, origin=ORIGIN, modality=AUDIO)])

    async def _run(self, work: _Transcription, prompts: Sequence[TokenPrompt], sampling: Sampling) -> list[SampleDelta]:
        """Returns the model's output for each prompt."""
        request = Request(
            request_id=work.sent.request_id or uuid.uuid4().hex,
            model=work.form.model,
            prompts=prompts,
            sampling=sampling,
            arrival_s=work.sent.arrival_s,
            deadline_s=work.sent.deadline_s,
            tenant=work.sent.tenant,
            final_only=True,
        )
        async with self._generator.start(request, work.call) as generation:
            return await generation.collect()

    def _read(self, work: _Transcription, piece: Piece, delta: SampleDelta, temperature: float) -> _Spoken:
        """Returns the segments and the text of a piece, and whether they are accepted."""
        rate, known = self._files.rate, self._vocabulary
        logprobs = [entry.logprob for entry in delta.logprobs]
        avg_logprob = sum(logprobs) / len(logprobs) if logprobs else 0.0
        piece_s, offset_s = (piece.end - piece.start) / rate, piece.start / rate
        found = segments_of(delta.token_ids, known, self._text, piece_s, offset_s)
        segments = [replace(segment, temperature=temperature, avg_logprob=avg_logprob) for segment in found]
        text = joined(segment.text for segment in segments)
        return _Spoken(segments, text, avg_logprob, RULES.is_accepted(text, avg_logprob))

    def _text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens; special ones are left out."""
        return self._tokenizer.decode([*token_ids], skip_special_tokens=True)


def _worth(spoken: _Spoken) -> tuple[bool, bool, float]:
    """Returns the order of attempts: accepted ones, then those that are no repetitions, then the most likely."""
    return spoken.is_accepted, compression_ratio(spoken.text) <= RULES.most_compression, spoken.avg_logprob
