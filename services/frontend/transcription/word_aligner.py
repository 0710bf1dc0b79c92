"""Finds the times of words by the attention of their tokens to the sound (Whisper, arXiv 2212.04356)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
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
        offset, at = piece.start / work.rate, 0
        timed: list[list[Word]] = []  # of each segment
        for segment in spoken.segments:
            words = words_of(segment.token_ids, self._decoder.text, work.written_language)
            timed.append(timed_words(words, times[at:], offset))
            at += len(segment.token_ids)
        trimmed = iter(trimmed_words(list(chain(*timed)), work.sound(piece), work.rate, offset))
        pairs = [
            (segment, tuple(islice(trimmed, len(words)))) for segment, words in zip(spoken.segments, timed, strict=True)
        ]
        return spoken._replace(segments=[_with_words(segment, words) for segment, words in pairs])


def _with_words(segment: Segment, words: tuple[Word, ...]) -> Segment:
    """Returns a segment with its words, from the first to the last of them."""
    return replace(segment, start=words[0].start, end=words[-1].end, words=words) if words else segment
