"""Finds the times of words by the attention of their tokens to the sound (Whisper, arXiv 2212.04356)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.frontend.request.request import Alignment
from quire.shared.transcription.alignment import first_rows
from quire.shared.transcription.timestamps import STEP_S, WhisperVocabulary
from quire.shared.transcription.words import timed_words, trimmed_words, words_of

if TYPE_CHECKING:
    from quire.services.frontend.transcription.model_calls import ModelCalls
    from quire.services.frontend.transcription.piece_decoder import PieceDecoder
    from quire.services.frontend.transcription.work import SpokenPiece, TranscriptionWork
    from quire.shared.transcription.silence import Piece
    from quire.shared.transcription.transcript import Segment, Word


class WordAligner:
    """Gives words their times, and segments those of their words."""

    def __init__(self, calls: ModelCalls, decoder: PieceDecoder, vocabulary: WhisperVocabulary) -> None:
        self._calls, self._decoder, self._vocabulary = calls, decoder, vocabulary

    async def with_words(
        self, work: TranscriptionWork, pieces: Sequence[Piece], spoken: Sequence[SpokenPiece]
    ) -> list[SpokenPiece]:
        """Returns the texts of pieces with the times of their words; the model reads them once more, in parallel.
        Raises QuireError."""
        found = list(spoken)
        chosen = [index for index, one in enumerate(spoken) if one.token_ids]
        if not chosen:
            return found
        beginning = [*self._decoder.beginning(work), self._vocabulary.no_timestamps]
        rows = [math.ceil(work.seconds(pieces[index]) / STEP_S) for index in chosen]
        prompts = [(pieces[index], [*beginning, *spoken[index].token_ids]) for index in chosen]
        # The first row is that of the token before the text: it attends to what it predicts.
        alignments = await self._calls.align(work, prompts, Alignment(len(beginning) - 1, max(1, *rows)))
        for index, num_rows, alignment in zip(chosen, rows, alignments, strict=True):
            starts = await asyncio.to_thread(first_rows, alignment[:, : max(1, num_rows)])
            times = [row * STEP_S for row in starts.tolist()]
            found[index] = self._timed(work, pieces[index], spoken[index], times)
        return found

    def _timed(self, work: TranscriptionWork, piece: Piece, spoken: SpokenPiece, times: Sequence[float]) -> SpokenPiece:
        """Returns the text of a piece with words. `times`: of each token and of the end, from the piece's start."""
        segments, at = [], 0
        for segment in spoken.segments:
            count = len(segment.token_ids)
            words = self._words(work, piece, segment, times[at : at + count + 1])
            at += count
            start, end = (words[0].start, words[-1].end) if words else (segment.start, segment.end)
            segments.append(replace(segment, start=start, end=end, words=tuple(words)))
        return spoken._replace(segments=segments)

    def _words(self, work: TranscriptionWork, piece: Piece, segment: Segment, times: Sequence[float]) -> list[Word]:
        """Returns the words of a segment."""
        words = words_of(segment.token_ids, self._decoder.text, work.written_language)
        offset = piece.start / work.rate
        return trimmed_words(timed_words(words, times, offset), work.sound(piece), work.rate, offset)
