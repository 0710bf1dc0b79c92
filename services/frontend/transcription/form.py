"""Multipart forms of POST /v1/audio/transcriptions and /translations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from quire.services.frontend.bounds.multipart import MAX_VALUE_BYTES, form_parts
from quire.services.frontend.request.scalar_parameters import RECOMMENDED
from quire.shared.errors import InvalidArgument, Unimplemented
from quire.shared.transcription.formats import FORMATS

FILE, GRANULARITIES = "file", "timestamp_granularities[]"
WORD, SEGMENT = "word", "segment"
MIB = 1 << 20
MAX_FORM_BYTES = 25 * MIB + 64 * 1024  # OpenAI's limit of a file, and the fields
MOST_TEMPERATURE = 1.0
# Fields of vLLM's and OpenAI's forms that this server does not have.
NOT_OFFERED = frozenset({
    "frequency_penalty", "include[]", "known_speaker_names[]", "known_speaker_references[]", "length_penalty", "n",
    "presence_penalty", "to_language", "use_beam_search", "vllm_xargs", *RECOMMENDED,
})  # fmt: skip
AUTO = "auto"  # OpenAI's name for cutting at silence
STREAMED = ("json", "text")  # formats whose text can be sent as it comes
STREAM_OPTIONS = ("stream_include_usage", "stream_continuous_usage_stats")
TIMED = ("verbose_json", "srt", "vtt")  # formats with times
TRUE, FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off", ""})

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class TranscriptionForm:
    """Fields of a form, checked except for what depends on the model."""

    content: bytes = field(repr=False)
    model: str = ""
    language: str = ""  # ISO 639 code; empty: detected
    prompt: str = ""  # text in the style of the transcript, or what was said before
    hotwords: str = ""  # names and words that are likely
    condition_on_previous_text: bool = False  # pieces follow the text before them, one after the other
    response_format: str = "json"
    temperature: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None  # of each piece
    granularities: tuple[str, ...] = (SEGMENT,)
    stream: bool = False

    @property
    def has_times(self) -> bool:
        """Whether the answer has the times of segments."""
        return self.response_format in TIMED

    @property
    def has_words(self) -> bool:
        """Whether the answer has the times of words."""
        return WORD in self.granularities

    @property
    def has_segments(self) -> bool:
        """Whether the answer has segments."""
        return SEGMENT in self.granularities


def read_form(body: bytes, boundary: bytes) -> TranscriptionForm:
    """Reads a form. Raises InvalidArgument that names the field for values that are not allowed, Unimplemented for
    fields and values that are not offered."""
    fields: dict[str, list[str]] = {}
    content: bytes | None = None
    for name, filename, start, end in form_parts(body, boundary):
        if name == FILE:
            if not filename:
                raise InvalidArgument("Expected 'file' to be a file-like object, not 'str'.", field=FILE)
            content = body[start:end]
        elif end - start > MAX_VALUE_BYTES:
            raise InvalidArgument(f"{name[:64]}: at most {MAX_VALUE_BYTES} bytes are accepted", field=name[:64])
        else:
            fields.setdefault(name, []).append(body[start:end].decode(errors="replace"))
    if not content:
        raise InvalidArgument("file: the form must have a sound file that is not empty", field=FILE)
    return checked_form(content, fields)


def checked_form(content: bytes, fields: Mapping[str, Sequence[str]]) -> TranscriptionForm:
    """Returns the form of these fields, as texts; the last value of a repeated one counts. Raises as read_form()."""
    last = {name: values[-1] for name, values in fields.items()}
    for name in fields:
        if name in NOT_OFFERED and last[name]:
            raise Unimplemented(f"{name}: not supported for transcriptions; leave it out", field=name)
    if last.get("chunking_strategy", AUTO) not in ("", AUTO):
        text = f"chunking_strategy: must be {AUTO}, got {last['chunking_strategy']!r:.64}; sound is cut at silence"
        raise InvalidArgument(text, field="chunking_strategy")
    form = last.get("response_format") or "json"
    if form not in FORMATS:
        text = f"response_format: must be one of {', '.join(FORMATS)}, got {form!r:.64}"
        raise InvalidArgument(text, field="response_format")
    temperature = _number(last, "temperature", float, 0.0, MOST_TEMPERATURE)
    return TranscriptionForm(
        content,
        model=last.get("model", ""),
        language=last.get("language", "").strip().lower(),
        prompt=last.get("prompt", ""),
        hotwords=last.get("hotwords", ""),
        condition_on_previous_text=_flag(last, "condition_on_previous_text"),
        response_format=form,
        temperature=0.0 if temperature is None else temperature,
        seed=_number(last, "seed", int, -(2**63), 2**63 - 1),
        max_tokens=_number(last, "max_completion_tokens", int, 1, 1 << 20),
        granularities=_granularities(fields, form),
        stream=_is_stream(last, form),
    )


def _is_stream(last: Mapping[str, str], form: str) -> bool:
    """Returns whether the text is to be streamed. Raises InvalidArgument for formats that are written at the end, and
    for options of a stream that was not asked for."""
    if _flag(last, "stream"):
        if form not in STREAMED:
            text = f"stream: needs response_format {' or '.join(STREAMED)}, got {form}"
            raise InvalidArgument(text, field="stream")
        return True
    for name in STREAM_OPTIONS:
        if last.get(name, "").lower() in TRUE:
            raise InvalidArgument("Stream options can only be defined when `stream=True`.", field=name)
    return False


def _flag(last: Mapping[str, str], name: str) -> bool:
    """Returns a field that is true or false, which it is if it is missing. Raises InvalidArgument for other texts."""
    written = last.get(name, "").strip().lower()
    if written not in TRUE | FALSE:
        raise InvalidArgument(f"{name}: must be true or false, got {written!r:.64}", field=name)
    return written in TRUE


def _granularities(fields: Mapping[str, Sequence[str]], form: str) -> tuple[str, ...]:
    """Returns the requested granularities of times, segments if there are none. Raises InvalidArgument for unknown ones
    and formats without times."""
    given = [*fields.get(GRANULARITIES, ()), *fields.get("timestamp_granularities", ())]
    for one in given:
        if one not in (SEGMENT, WORD):
            raise InvalidArgument(f"{GRANULARITIES}: must be segment or word, got {one!r:.64}", field=GRANULARITIES)
    if given and form not in TIMED:
        text = f"{GRANULARITIES}: needs response_format verbose_json, srt or vtt, got {form}"
        raise InvalidArgument(text, field=GRANULARITIES)
    return tuple(dict.fromkeys(given)) or (SEGMENT,)


def _number(last: Mapping[str, str], name: str, kind: Callable[[str], T], least: T, most: T) -> T | None:
    """Returns a field as a number; None if it is missing or empty. Raises InvalidArgument for other texts and values
    out of range."""
    written = last.get(name, "").strip()
    if not written:
        return None
    try:
        value = kind(written)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise InvalidArgument(f"{name}: must be a number from {least} to {most}, got {written!r:.64}", field=name)
    return value
