"""Conversion of sound and options to messages of Transcribe, and of its messages to transcripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from quire import sounds
from quire.requests import RequestOptions
from quire.shared.errors import InvalidArgument
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.transcription.transcript import Segment, Transcript, Word

PIECE_BYTES = 256 * 1024
FIELD = "file"


class TranscriptionExtras(TypedDict, total=False):
    """Options of a transcription, named as in the form of /v1/audio/transcriptions."""

    language: str  # ISO 639 code; without it the language is detected
    prompt: str  # what was said before, or a text in the style of the transcript
    translate: bool  # into English
    temperature: float  # 0 to 1
    seed: int
    max_completion_tokens: int  # of each piece
    hotwords: str  # names and words that are likely
    condition_on_previous_text: bool  # pieces follow the text before them, one after the other
    timestamp_granularities: Sequence[str]  # "segment", "word": the model finds their times


@dataclass(frozen=True, slots=True)
class TranscriptDelta:
    """New part of a transcript; the last one has the whole transcript as `done`, and no text of its own."""

    text: str
    segments: Sequence[Segment]
    seconds: float  # of the file
    done: pb.TranscriptionSummary | None = None


def transcription_messages(
    sound: Any, options: RequestOptions | None, extras: TranscriptionExtras
) -> Iterator[pb.TranscribeRequest]:
    """Returns the messages of a call. `sound`: an array, a pair of an array and its sampling rate, a path or the bytes
    of a file. Raises InvalidArgument for other values, a file that cannot be read, and unknown options."""
    content, options = _content(sound), options or RequestOptions()
    for name in extras:
        if name not in TranscriptionExtras.__annotations__:
            known = ", ".join(TranscriptionExtras.__annotations__)
            raise InvalidArgument(f"{name} is not an option of transcriptions; available: {known}", field=name)
    asked = pb.TranscriptionOptions(
        model=options.model,
        request_id=options.request_id,
        tenant=options.tenant,
        content_bytes=len(content),
        **extras,
    )
    return _messages(asked, content)


def _messages(options: pb.TranscriptionOptions, content: bytes) -> Iterator[pb.TranscribeRequest]:
    yield pb.TranscribeRequest(options=options)
    for start in range(0, len(content), PIECE_BYTES):
        yield pb.TranscribeRequest(content=content[start : start + PIECE_BYTES])


def _content(sound: Any) -> bytes:
    """Returns the bytes of a file of sound. Raises InvalidArgument for URLs, which the server does not fetch here."""
    part = sounds.media_part(sound)
    if part.WhichOneof("source") != "content":
        text = f"{FIELD}: URLs are not fetched for a transcription; pass a path, bytes, or an array and its rate"
        raise InvalidArgument(text, field=FIELD)
    return part.content


def transcript_delta(message: pb.TranscribeResponse) -> TranscriptDelta:
    """Returns the increment of a message."""
    segments = [
        Segment(
            each.start,
            each.end,
            each.text,
            tuple(each.tokens),
            each.temperature,
            each.avg_logprob,
            each.no_speech_prob if each.HasField("no_speech_prob") else None,
            tuple(Word(word.start, word.end, word.word) for word in each.words),
        )
        for each in message.segments
    ]
    return TranscriptDelta(
        message.delta, segments, message.duration, message.done if message.HasField("done") else None
    )


def collected(deltas: Iterable[TranscriptDelta]) -> Transcript:
    """Returns the whole transcript. `deltas`: of one call, to its end."""
    segments: list[Segment] = []
    for delta in deltas:
        segments += delta.segments
        if delta.done is not None:
            done = delta.done
            return Transcript(segments, done.text, done.language, delta.seconds, done.task)
    raise InvalidArgument("the transcript has no end; collect all of its parts", field=FIELD)
