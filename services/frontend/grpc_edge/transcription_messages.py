"""Conversion between messages of InferenceService.Transcribe and forms and transcripts."""

from __future__ import annotations

from collections.abc import Sequence

from quire.services.frontend.transcription.form import GRANULARITIES, TranscriptionForm, checked_form
from quire.services.frontend.transcription.work import TRANSCRIBE, TRANSLATE
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.transcription.quality import compression_ratio
from quire.shared.transcription.transcript import Segment, Transcript

FIELD = "timestamp_granularities"


def form_of(options: pb.TranscriptionOptions, content: bytes) -> TranscriptionForm:
    """Returns the form of these options. Raises InvalidArgument and Unimplemented as for a form that was sent through
    HTTP."""
    fields: dict[str, Sequence[str]] = {
        name: [str(getattr(options, name))]
        for name in ("model", "language", "prompt", "hotwords", "temperature")
        if getattr(options, name)
    }
    for name in ("seed", "max_completion_tokens"):
        if options.HasField(name):
            fields[name] = [str(getattr(options, name))]
    if options.condition_on_previous_text:
        fields["condition_on_previous_text"] = ["true"]
    if options.timestamp_granularities:
        fields["response_format"] = ["verbose_json"]
        fields[GRANULARITIES] = [*options.timestamp_granularities]
    return checked_form(content, fields)


def task_of(options: pb.TranscriptionOptions) -> str:
    return TRANSLATE if options.translate else TRANSCRIBE


def increment(request_id: str, before: Transcript, after: Transcript) -> pb.TranscribeResponse:
    """Returns the message of what a transcript has more than an earlier one."""
    first = len(before.segments)
    return pb.TranscribeResponse(
        request_id=request_id,
        delta=after.text[len(before.text) :],
        segments=[_segment(number, segment) for number, segment in enumerate(after.segments[first:], first)],
        duration=after.seconds,
    )


def ending(request_id: str, transcript: Transcript) -> pb.TranscribeResponse:
    """Returns the last message of a transcript."""
    done = pb.TranscriptionSummary(text=transcript.text, language=transcript.language, task=transcript.task)
    return pb.TranscribeResponse(request_id=request_id, done=done, duration=transcript.seconds)


def _segment(number: int, segment: Segment) -> pb.TranscriptionSegment:
    return pb.TranscriptionSegment(
        id=number,
        start=segment.start,
        end=segment.end,
        text=segment.text,
        tokens=segment.token_ids,
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=compression_ratio(segment.text),
        no_speech_prob=segment.no_speech_prob,
        words=[pb.TranscriptionWord(start=word.start, end=word.end, word=word.text) for word in segment.words],
    )
