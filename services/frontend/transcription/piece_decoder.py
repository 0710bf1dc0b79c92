"""Decodes pieces of sound with Whisper: prompts, attempts at rising temperatures, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.frontend.request.request import Sampling, TimestampRules
from quire.services.frontend.transcription.work import (
    NOTHING_SPOKEN,
    TRANSLATE,
    PieceRequest,
    SpokenPiece,
    TranscriptionWork,
)
from quire.shared.transcription.joining import joined
from quire.shared.transcription.quality import TEMPERATURES, QualityRules, compression_ratio
from quire.shared.transcription.silence import loud_seconds
from quire.shared.transcription.timestamps import WhisperVocabulary, segments_of

if TYPE_CHECKING:
    from quire.services.frontend.output_processor.delta import SampleDelta
    from quire.services.frontend.tokenizer.tokenizer import Tokenizer
    from quire.services.frontend.transcription.model_calls import ModelCalls
    from quire.shared.transcription.silence import Piece

MOST_PROMPT_TOKENS = 223  # of the text before: half of the decoder's context, as in the model's training
MOST_HOTWORD_TOKENS = 111  # half of them, so that there is text before as well
MAX_INITIAL_STEPS = 50  # of 0.02 s: pieces begin with their speech
RULES = QualityRules()


class PieceDecoder:
    """Turns pieces of sound into segments of text."""

    def __init__(self, calls: ModelCalls, tokenizer: Tokenizer, vocabulary: WhisperVocabulary) -> None:
        self._calls, self._tokenizer, self._vocabulary = calls, tokenizer, vocabulary

    async def language(self, work: TranscriptionWork, piece: Piece) -> str:
        """Returns the language of a piece: the most likely token of a language after the start."""
        languages = self._vocabulary.languages
        sampling = Sampling(temperature=0.0, max_tokens=1, allowed_token_ids=sorted(languages.values()))
        (delta,) = await self._calls.generate(work, [(piece, [self._vocabulary.start])], sampling)
        names = {token: name for name, token in languages.items()}
        return names.get(delta.token_ids[0], "") if delta.token_ids else ""

    async def decode_pieces(self, work: TranscriptionWork, asked: Sequence[PieceRequest]) -> list[SpokenPiece]:
        """Decodes pieces in parallel; those whose text is a repetition or a guess are decoded again, each time at the
        next temperature. If no attempt is accepted, the best one is taken; pieces without speech have no text. Raises
        QuireError."""
        first, *others = [work.form.temperature] if work.form.temperature else TEMPERATURES
        found: dict[int, SpokenPiece] = {}  # by index
        await self._attempt(work, asked, range(len(asked)), first, found)
        doubtful = [index for index in found if self._is_doubtful(work, asked[index].piece, found[index])]
        no_speech = await self._no_speech(work, asked, doubtful)
        for index, likely in no_speech.items():
            if _is_silence(found[index], likely):
                found[index] = NOTHING_SPOKEN
        for temperature in others:
            left = [index for index in found if not found[index].is_accepted]
            await self._attempt(work, asked, left, temperature, found)
        for index, likely in no_speech.items():
            spoken = found[index]
            is_guess = not spoken.is_accepted and RULES.is_guess(spoken.avg_logprob, likely)
            found[index] = NOTHING_SPOKEN if is_guess else _with_no_speech(spoken, likely)
        return [found[index] for index in range(len(asked))]

    def _is_doubtful(self, work: TranscriptionWork, piece: Piece, spoken: SpokenPiece) -> bool:
        """Returns whether a text may be a guess about sound without speech."""
        loud_s = loud_seconds(work.sound(piece), work.rate, work.level)
        return not spoken.is_accepted or RULES.is_sparse(len(spoken.token_ids), loud_s)

    async def _attempt(
        self,
        work: TranscriptionWork,
        asked: Sequence[PieceRequest],
        chosen: Sequence[int],
        temperature: float,
        found: dict[int, SpokenPiece],
    ) -> None:
        """Decodes the chosen pieces at a temperature; what is better than before goes to `found`."""
        for has_times in (True, False):
            alike = [index for index in chosen if asked[index].has_times == has_times]
            if not alike:
                continue
            prompts = [(asked[index].piece, self._prompt(work, asked[index])) for index in alike]
            sampling = self._sampling(work, temperature, has_times=has_times)
            deltas = await self._calls.generate(work, prompts, sampling)
            for index, delta in zip(alike, deltas, strict=True):
                read = self._read(work, asked[index].piece, delta, temperature)
                found[index] = max(found.get(index, read), read, key=_worth)

    async def _no_speech(
        self, work: TranscriptionWork, asked: Sequence[PieceRequest], chosen: Sequence[int]
    ) -> dict[int, float]:
        """Returns the probability that there is no speech, for each of the chosen pieces; nothing if the model's
        vocabulary has no token for it."""
        token = self._vocabulary.no_speech
        if token is None or not chosen:
            return {}
        sampling = Sampling(temperature=0.0, max_tokens=1, logprob_token_ids=[token])
        prompts = [(asked[index].piece, [self._vocabulary.start]) for index in chosen]
        deltas = await self._calls.generate(work, prompts, sampling)
        return {
            index: math.exp(dict(delta.logprobs[0].top).get(token, -math.inf)) if delta.logprobs else 0.0
            for index, delta in zip(chosen, deltas, strict=True)
        }

    def _sampling(self, work: TranscriptionWork, temperature: float, *, has_times: bool) -> Sampling:
        form, known = work.form, self._vocabulary
        rules = TimestampRules(known.first_timestamp, known.no_timestamps, MAX_INITIAL_STEPS) if has_times else None
        return Sampling(
            temperature=temperature, seed=form.seed, max_tokens=form.max_tokens, logprobs=0, timestamps=rules
        )

    def _prompt(self, work: TranscriptionWork, asked: PieceRequest) -> list[int]:
        """Returns the tokens that the decoder continues: the text before, start, language, task, and whether there are
        time stamps."""
        tokens = [*self._previous(work, asked.context), *self.beginning(work)]
        return tokens if asked.has_times else [*tokens, self._vocabulary.no_timestamps]

    def beginning(self, work: TranscriptionWork) -> list[int]:
        """Returns the tokens for start, language and task."""
        known = self._vocabulary
        task = known.translate if work.task == TRANSLATE else known.transcribe
        if not known.languages:
            return [known.start]
        language = [known.languages[work.language]] if work.language else []
        return [known.start, *language, *([] if task is None else [task])]

    def _previous(self, work: TranscriptionWork, context: Sequence[int]) -> list[int]:
        """Returns the tokens of hot words, of the client's text and of the text before, as far as there is room, behind
        the token that says so; nothing if there are none."""
        if self._vocabulary.previous is None:
            return []
        hot = self._text_tokens(work.form.hotwords)[:MOST_HOTWORD_TOKENS]
        before = [*self._text_tokens(work.form.prompt), *context][len(hot) - MOST_PROMPT_TOKENS :]
        return [self._vocabulary.previous, *hot, *before] if hot or before else []

    def _text_tokens(self, text: str) -> list[int]:
        """Returns the tokens of a client's text, in which special tokens mean nothing."""
        if not text.strip():
            return []
        ids = self._tokenizer.encode_plainly(f" {text.strip()}")
        return [token for token in ids if token < self._vocabulary.end_of_text]

    def _read(self, work: TranscriptionWork, piece: Piece, delta: SampleDelta, temperature: float) -> SpokenPiece:
        """Returns the segments and the text of a piece, and whether they are accepted."""
        known = self._vocabulary
        pairs = zip(delta.token_ids, delta.logprobs, strict=False)
        logprobs = [entry.logprob for token, entry in pairs if known.time_of(token) is None]
        avg_logprob = sum(logprobs) / len(logprobs) if logprobs else 0.0
        found = segments_of(delta.token_ids, known, self.text, work.seconds(piece), piece.start / work.rate)
        segments = [replace(segment, temperature=temperature, avg_logprob=avg_logprob) for segment in found]
        text = joined((segment.text for segment in segments), work.written_language)
        return SpokenPiece(segments, text, avg_logprob, RULES.is_accepted(text, avg_logprob), temperature)

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens; special ones are left out."""
        return self._tokenizer.decode([*token_ids], skip_special_tokens=True)


def _worth(spoken: SpokenPiece) -> tuple[bool, bool, float]:
    """Returns the order of attempts: accepted ones, then those that are no repetitions, then the most likely."""
    return spoken.is_accepted, compression_ratio(spoken.text) <= RULES.most_compression, spoken.avg_logprob


def _is_silence(spoken: SpokenPiece, no_speech: float) -> bool:
    """Returns whether a piece whose text is doubtful has no speech: the model says so, and has no confidence in the
    text, or the text is too short for the sound."""
    return RULES.is_silence(spoken.avg_logprob, no_speech) or (spoken.is_accepted and no_speech > RULES.most_no_speech)


def _with_no_speech(spoken: SpokenPiece, no_speech: float) -> SpokenPiece:
    """Returns the text with the probability that there is no speech."""
    return spoken._replace(segments=[replace(segment, no_speech_prob=no_speech) for segment in spoken.segments])
