"""Progress of a transcription through a stretch of sound, piece by piece, so that nothing is lost between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from quire.services.frontend.transcription.piece_decoder import RULES
from quire.services.frontend.transcription.work import (
    NOTHING_SPOKEN,
    PieceRequest,
    SpokenPiece,
    TranscriptionWork,
)
from quire.shared.transcription.joining import joined, num_repeated
from quire.shared.transcription.silence import Piece, first_piece, loud_seconds, speech_start
from quire.shared.transcription.words import words_of

if TYPE_CHECKING:
    from quire.shared.transcription.transcript import Segment

TIMED_S = 10.0  # pieces that are longer are decoded with time stamps, which tell how far the model has read
LEAST_UNREAD_S = 1.0  # of a tail that is read again
LEAST_LOUD_S = 0.5  # of speech in it
TAIL_LEVEL = 0.1  # of the level of the piece's speech, which a tail reaches
END_S = 0.5  # before the end of a cut piece: a segment that ends there may be a part of a sentence
RESET_TEMPERATURE = 0.5  # a text of a higher one is not what later pieces are conditioned on

Text = Callable[[Sequence[int]], str]
TimeToken = Callable[[float], int]


class Reading:
    """Texts of one stretch of sound, and what is left of it. Pieces of a stretch are decoded one after the other."""

    def __init__(
        self, work: TranscriptionWork, spans: Iterable[Piece], most_s: float, text: Text, time_token: TimeToken
    ) -> None:
        """`spans`: stretches to read, in order; `most_s`: length of the longest piece, in seconds; `text`: of tokens;
        `time_token`: the time stamp of a number of seconds."""
        self._work, self._most_s, self._text, self._time_token = work, most_s, text, time_token
        self._left = deque(spans)
        self._context: list[int] = []
        self._is_again = False  # what comes next has been decoded before, and its text may repeat that before it
        self._asks_times = False
        self.spoken: list[SpokenPiece] = []

    @property
    def is_finished(self) -> bool:
        return not self._left

    def request(self) -> PieceRequest:
        """Returns the next piece to decode."""
        work, span = self._work, self._left[0]
        cut = first_piece(work.sound(span), work.rate, self._most_s, self._most_s / 6)
        piece = Piece(span.start, span.start + cut.end, cut.is_cut)
        has_times = work.form.has_times or self._asks_times or work.seconds(piece) > TIMED_S
        context = tuple(self._context) if work.form.condition_on_previous_text else ()
        return PieceRequest(piece, has_times, context)

    def advance(self, asked: PieceRequest, spoken: SpokenPiece) -> None:
        """Takes the text of the piece and sets the next piece to what the model has not read."""
        piece, has_times = asked.piece, asked.has_times
        if not has_times and self._stopped_early(piece, spoken):
            self._asks_times = True
            return
        if self._is_again:
            spoken = self._without_repeats(spoken) if spoken.is_accepted else NOTHING_SPOKEN
        resume = piece.end
        if has_times and spoken.segments:
            spoken, resume = self._until_unread(piece, spoken)
        self._add(asked, spoken)
        self._asks_times = False
        span = self._left.popleft()
        self._is_again = resume < piece.end
        if resume < span.end:
            rest = Piece(resume, span.end)
            start = resume + speech_start(self._work.sound(rest), self._work.rate, self._work.level)
            self._left.appendleft(Piece(start, span.end))

    def _stopped_early(self, piece: Piece, spoken: SpokenPiece) -> bool:
        """Returns whether a text without time stamps is much shorter than the speech."""
        if self._work.form.max_tokens is not None or not spoken.text:
            return False
        loud_s = loud_seconds(self._work.sound(piece), self._work.rate, self._work.level)
        return RULES.is_sparse(len(spoken.token_ids), loud_s)

    def _until_unread(self, piece: Piece, spoken: SpokenPiece) -> tuple[SpokenPiece, int]:
        """Returns the text up to where reading resumes, and that sample: the end of the last segment, if speech follows
        it; its start, if the piece's end cuts it; else the end of the piece."""
        rate, last = self._work.rate, spoken.segments[-1]
        if piece.is_cut and len(spoken.segments) > 1 and last.end * rate >= piece.end - END_S * rate:
            kept = spoken.segments[:-1]
            text = joined((segment.text for segment in kept), self._work.written_language)
            return spoken._replace(segments=kept, text=text), max(piece.start + rate, round(last.start * rate))
        end = max(round(last.end * rate), piece.start + round(0.1 * rate))
        return (spoken, end) if self._has_speech(piece, end) else (spoken, piece.end)

    def _has_speech(self, piece: Piece, start: int) -> bool:
        """Returns whether there is speech from `start` to the end of the piece."""
        work, tail = self._work, Piece(start, piece.end)
        if work.form.max_tokens is not None or work.seconds(tail) < LEAST_UNREAD_S:
            return False
        sound = work.sound(piece)
        frames = sound[: len(sound) // 320 * 320].reshape(-1, 320)
        speech = float(np.percentile(np.sqrt(np.mean(np.square(frames, dtype=np.float64), axis=1)), 90))
        return loud_seconds(work.sound(tail), work.rate, max(work.level, TAIL_LEVEL * speech)) >= LEAST_LOUD_S

    def _without_repeats(self, spoken: SpokenPiece) -> SpokenPiece:
        """Returns the text without the words at its beginning with which the text before ends."""
        if not self.spoken or not spoken.segments:
            return spoken
        language = self._work.written_language
        before = [word.text for word in words_of(self.spoken[-1].token_ids, self._text, language)]
        after = [word.text for word in words_of(spoken.token_ids, self._text, language)]
        count = num_repeated(before, after)
        segments = []
        for segment in spoken.segments:
            kept, dropped = self._without_words(segment, count, language)
            count -= dropped
            segments += [kept] if kept.text else []
        return spoken._replace(segments=segments, text=joined((one.text for one in segments), language))

    def _without_words(self, segment: Segment, count: int, language: str) -> tuple[Segment, int]:
        """Returns a segment without its first `count` words, and how many it had of them."""
        words = words_of(segment.token_ids, self._text, language)[:count]
        tokens = segment.token_ids[sum(word.num_tokens for word in words) :]
        if not words:
            return segment, 0
        timed = segment.words[sum(bool(word.text.strip()) for word in words) :]
        start = timed[0].start if timed else segment.start
        return replace(segment, token_ids=tokens, text=self._text(tokens).strip(), words=timed, start=start), len(words)

    def _add(self, asked: PieceRequest, spoken: SpokenPiece) -> None:
        """Appends a text and sets what the next one is conditioned on, with time stamps if it has them: the model
        keeps the form of the text before."""
        self.spoken.append(spoken)
        if spoken.temperature > RESET_TEMPERATURE:
            self._context.clear()
            return
        offset = asked.piece.start / self._work.rate
        for segment in spoken.segments:
            times = (
                [self._time_token(time - offset) for time in (segment.start, segment.end)] if asked.has_times else []
            )
            self._context += [*times[:1], *segment.token_ids, *times[1:]]
