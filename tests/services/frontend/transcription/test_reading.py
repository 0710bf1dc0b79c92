"""Nothing of a stretch of sound is lost or doubled between its pieces, wherever the model stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from quire.services.frontend.calls.calls import Call
from quire.services.frontend.http.headers import CallHeaders
from quire.services.frontend.transcription.form import TranscriptionForm
from quire.services.frontend.transcription.reading import Reading
from quire.services.frontend.transcription.work import PieceRequest, SpokenPiece, TranscriptionWork
from quire.shared.transcription.silence import Piece
from quire.shared.transcription.transcript import Segment, Word
from tests.shared.media.audio.files import noise

RATE = 16_000
VOCABULARY = ["I", "sleep", "with", "a", "dagger.", "You", "understand?", "no,"]
FIRST_TIME = 1000


def text(tokens: Sequence[int]) -> str:
    return "".join(f" {VOCABULARY[token]}" for token in tokens)


def segment(start: float, end: float, *tokens: int, words: tuple[Word, ...] = ()) -> Segment:
    return Segment(start, end, text(tokens).strip(), tokens, words=words)


def said(*segments: Segment, **fields: Any) -> SpokenPiece:
    known = {"avg_logprob": -0.2, "is_accepted": True, **fields}
    return SpokenPiece(list(segments), " ".join(one.text for one in segments), **known)


def reading(sound: np.ndarray, spans: list[tuple[float, float]], **form: Any) -> Reading:
    form = {"content": b"x", "response_format": "verbose_json", **form}
    nobody = cast("tuple[CallHeaders, Call]", (None, None))  # neither is read here
    work = TranscriptionWork(TranscriptionForm(**form), "transcribe", *nobody, sound, RATE, "en")
    pieces = [Piece(round(start * RATE), round(end * RATE)) for start, end in spans]
    return Reading(work, pieces, 30.0, text, lambda seconds: FIRST_TIME + round(seconds / 0.02))


def span(asked: PieceRequest) -> tuple[float, float]:
    return round(asked.piece.start / RATE, 2), round(asked.piece.end / RATE, 2)


def speech(seconds: float, *pauses: tuple[float, float]) -> np.ndarray:
    sound = noise(int(seconds * RATE), level=0.1)
    for start, end in pauses:
        sound[int(start * RATE) : int(end * RATE)] *= 1e-3
    return sound


def test_an_unread_tail_is_read_again() -> None:
    """vllm#53144: the last segment of 29.42 s of speech ends at 21.56 s, and the rest was in no text."""
    read = reading(speech(29.42), [(0, 29.42)])
    asked = read.request()
    assert span(asked) == (0, 29.42)
    read.advance(asked, said(segment(0, 21.56, 0, 1, 2)))
    asked = read.request()
    assert span(asked) == (21.56, 29.42)
    read.advance(asked, said(segment(21.56, 29.4, 5, 6)))
    assert read.is_finished
    assert [one.text for one in read.spoken] == ["I sleep with", "You understand?"]


def test_a_tail_without_speech_is_not_read_again() -> None:
    for sound in (speech(20, (12.2, 20)), speech(20, (12.2, 17), (17.2, 20)), speech(12.9)):
        read = reading(sound, [(0, len(sound) / RATE)])
        read.advance(read.request(), said(segment(0, 12, 0, 1, 2)))
        assert read.is_finished


def test_a_tail_is_read_from_where_its_speech_begins() -> None:
    """faster-whisper#125: a time stamp of Whisper is at most a second after the start of what it reads."""
    read = reading(speech(20, (12, 16)), [(0, 20)])
    read.advance(read.request(), said(segment(0, 12, 0, 1, 2)))
    assert 15.7 < span(read.request())[0] < 15.9


def test_a_guess_about_a_tail_is_dropped() -> None:
    read = reading(speech(20), [(0, 20)])
    read.advance(read.request(), said(segment(0, 12, 0, 1)))
    read.advance(read.request(), said(segment(12, 19.9, 7), is_accepted=False))
    assert read.is_finished
    assert [one.text for one in read.spoken] == ["I sleep", ""]


def test_reading_ends_although_nothing_is_read() -> None:
    """A model that stops at once, again and again, does not hold the request forever."""
    read, count = reading(speech(25), [(0, 25)]), 0
    while not read.is_finished:
        asked = read.request()
        start = asked.piece.start / RATE
        read.advance(asked, said(segment(start, start, 0)))
        count += 1
        assert count < 300
    empty = reading(speech(25), [(0, 25)])
    empty.advance(empty.request(), said())
    assert empty.is_finished


def test_words_that_were_read_twice_are_in_the_text_once() -> None:
    read = reading(speech(20), [(0, 20)])
    read.advance(read.request(), said(segment(0, 12, 0, 1, 2)))
    words = (Word(12.0, 12.2, "sleep"), Word(12.2, 12.6, "with"), Word(12.6, 14.0, "a"))
    read.advance(read.request(), said(segment(12, 14, 1, 2, 3, words=words), segment(14, 19.9, 4)))
    (_, second) = read.spoken
    assert second.text == "a dagger."
    assert [(one.start, one.token_ids) for one in second.segments] == [(12.6, (3,)), (14, (4,))]
    assert second.segments[0].words == words[2:]


def test_a_word_that_is_said_twice_is_kept() -> None:
    read = reading(speech(20), [(0, 20)])
    read.advance(read.request(), said(segment(0, 12, 0, 7)))
    read.advance(read.request(), said(segment(12, 19.9, 7, 0, 1)))
    assert read.spoken[1].text == "no, I sleep"


def test_a_sentence_that_a_cut_divides_is_read_as_a_whole() -> None:
    """vllm#58029: the words between the last whole segment and a cut in the middle of speech were lost."""
    read = reading(speech(40), [(0, 40)])
    asked = read.request()
    assert asked.piece.is_cut
    cut = span(asked)[1]
    read.advance(asked, said(segment(0, 20, 0, 1), segment(20, cut - 4, 2, 3), segment(cut - 4, cut, 4)))
    assert span(read.request()) == (round(cut - 4, 2), 40)
    assert [one.text for one in read.spoken] == ["I sleep with a"]
    other = reading(speech(40), [(0, 40)])
    asked = other.request()
    other.advance(asked, said(segment(0, cut - 4, 0, 1)))  # the model wrote nothing about the last four seconds
    assert span(other.request())[0] == round(cut - 4, 2)


def test_a_cut_in_a_pause_loses_nothing_and_repeats_nothing() -> None:
    read = reading(speech(50, (27, 28)), [(0, 50)])
    asked = read.request()
    assert not asked.piece.is_cut
    read.advance(asked, said(segment(0, 26.9, 0, 1)))
    asked = read.request()
    assert 27 < span(asked)[0] < 28
    read.advance(asked, said(segment(28, 49.9, 0, 1)))
    assert [one.text for one in read.spoken] == ["I sleep", "I sleep"]


def test_a_text_that_is_too_short_is_decoded_again_with_time_stamps() -> None:
    read = reading(speech(9), [(0, 9)], response_format="json")
    asked = read.request()
    assert not asked.has_times
    read.advance(asked, said(segment(0, 9, 0, 1)))
    asked = read.request()
    assert (span(asked), asked.has_times, read.spoken) == ((0, 9), True, [])
    assert reading(speech(11), [(0, 11)], response_format="json").request().has_times


def test_text_is_conditioned_on_the_text_before_it() -> None:
    spans = [(0, 5), (10, 15), (20, 25), (30, 35)]
    read = reading(speech(35), spans, condition_on_previous_text=True)
    read.advance(read.request(), said(segment(0.5, 4.9, 0, 1)))
    first = (FIRST_TIME + 25, 0, 1, FIRST_TIME + 245)
    assert read.request().context == first
    read.advance(read.request(), said(segment(10, 14.9, 2), temperature=0.4))
    assert read.request().context == (*first, FIRST_TIME, 2, FIRST_TIME + 245)
    read.advance(read.request(), said(segment(20, 24.9, 3), temperature=0.6))
    assert read.request().context == (), "a text of a high temperature is not passed on"
    alone = reading(speech(35), spans)
    alone.advance(alone.request(), said(segment(0, 4.9, 0, 1)))
    assert alone.request().context == ()
