"""Formats of transcripts: plain text, OpenAI's JSON objects, SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from quire.shared.transcription.quality import compression_ratio
from quire.shared.transcription.transcript import Segment, Transcript, Word

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
ARROW = "-->"


def as_json(transcript: Transcript) -> dict[str, Any]:
    """Returns OpenAI's object of response_format json."""
    return {"text": transcript.text, "usage": {"type": "duration", "seconds": math.ceil(transcript.seconds)}}


def as_verbose_json(transcript: Transcript, *, has_words: bool = False, has_segments: bool = True) -> dict[str, Any]:
    """Returns OpenAI's object of response_format verbose_json, with the granularities that were asked for."""
    answer: dict[str, Any] = {
        "task": transcript.task,
        "language": transcript.language,
        "duration": transcript.seconds,
        "text": transcript.text,
        "usage": {"type": "duration", "seconds": math.ceil(transcript.seconds)},
    }
    if has_segments:
        answer["segments"] = [_segment(number, segment) for number, segment in enumerate(transcript.segments)]
    if has_words:
        answer["words"] = [
            {"word": word.text, "start": _seconds(word.start), "end": _seconds(word.end)} for word in transcript.words
        ]
    return answer


def _seconds(time: float) -> float:
    """Returns a time in whole milliseconds."""
    return round(time, 3)


def _segment(number: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": round(segment.start * 100),
        "start": _seconds(segment.start),
        "end": _seconds(segment.end),
        "text": segment.text,
        "tokens": [*segment.token_ids],
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": compression_ratio(segment.text),
        "no_speech_prob": segment.no_speech_prob,
    }


def as_text(transcript: Transcript) -> str:
    """Returns the text alone, ended by a newline."""
    return f"{transcript.text}\n"


def as_srt(transcript: Transcript, *, by_word: bool = False) -> str:
    """Returns the segments, or the words, as SubRip subtitles, numbered from 1."""
    cues = [
        f"{number}\n{_time(segment.start, ',')} {ARROW} {_time(segment.end, ',')}\n{text}\n"
        for number, (segment, text) in enumerate(_cues(transcript, by_word=by_word), 1)
    ]
    return "\n".join(cues)


def as_vtt(transcript: Transcript, *, by_word: bool = False) -> str:
    """Returns the segments, or the words, as WebVTT subtitles."""
    cues = [
        f"{_time(segment.start, '.')} {ARROW} {_time(segment.end, '.')}\n{_escaped(text)}\n"
        for segment, text in _cues(transcript, by_word=by_word)
    ]
    return "\n".join(["WEBVTT\n", *cues])


def _cues(transcript: Transcript, *, by_word: bool) -> Iterator[tuple[Segment | Word, str]]:
    """Yields the segments or words that have a text, with the text in one line: an empty line would end a cue, and an
    arrow would be read as times."""
    for segment in transcript.words if by_word else transcript.segments:
        text = " ".join(segment.text.split()).replace(ARROW, "->")
        if text:
            yield segment, text


def _time(seconds: float, separator: str) -> str:
    """Returns hours, minutes, seconds and milliseconds; players refuse times without hours or beyond 60 minutes."""
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{separator}{rest % 1000:03d}"


def _escaped(text: str) -> str:
    """Returns a text in which nothing is markup of WebVTT."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
