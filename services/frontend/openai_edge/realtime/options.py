"""Options of a realtime session, from session.update in the forms of vLLM and of OpenAI (present and beta)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.services.frontend.openai_edge.realtime.events import EventError

VLLM_RATE, OPENAI_RATE = 16_000, 24_000
LEAST_RATE, MOST_RATE = 8_000, 48_000
MOST_PROMPT = 4096  # characters
PCM = ("audio/pcm", "pcm16")
SERVER_VAD = "server_vad"
SILENCE_MS, LEAST_MS, MOST_MS = 500, 200, 10_000


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of the utterances of a session."""

    model: str = ""  # empty: the served one
    language: str = ""  # ISO 639 code; empty: detected
    prompt: str = ""
    rate: int = VLLM_RATE
    is_openai: bool = False  # the form of the session's events
    silence_s: float = 0.0  # after speech, that ends an utterance; 0: only a commit does

    def shown(self) -> dict[str, Any]:
        """Returns the options as session.created and session.updated show them."""
        transcription = {"model": self.model, "language": self.language or None, "prompt": self.prompt}
        sound = {
            "format": {"type": "audio/pcm", "rate": self.rate},
            "transcription": transcription,
            "turn_detection": self._shown_turns(),
        }
        return {"audio": {"input": sound}}

    def _shown_turns(self) -> dict[str, Any] | None:
        return {"type": SERVER_VAD, "silence_duration_ms": round(self.silence_s * 1000)} if self.silence_s else None


def updated(options: SessionOptions, event: Mapping[str, Any]) -> SessionOptions:
    """Returns the options after a session.update. Raises EventError that names the field for values that are not
    accepted."""
    session = event.get("session")
    if session is None:
        return SessionOptions(
            _text(event, "model", options.model),
            _text(event, "language", options.language).lower(),
            _text(event, "prompt", options.prompt),
            _rate(event.get("sample_rate", options.rate), "sample_rate"),
            options.is_openai,
            options.silence_s,
        )
    sound = _object(_object(session, "session").get("audio") or {}, "session.audio").get("input") or {}
    sound = _object(sound, "session.audio.input")
    _check_type(session)
    said = sound.get("transcription") or session.get("input_audio_transcription") or {}
    said = _object(said, "transcription")
    before = OPENAI_RATE if not options.is_openai else options.rate
    return SessionOptions(
        _text(said, "model", options.model),
        _text(said, "language", options.language).lower(),
        _text(said, "prompt", options.prompt),
        _format_rate(sound.get("format", session.get("input_audio_format")), before),
        is_openai=True,
        silence_s=_silence_s(session, sound, options.silence_s),
    )


def _check_type(session: Mapping[str, Any]) -> None:
    """Raises EventError for another kind of session."""
    if session.get("type", "transcription") != "transcription":
        text = f"session.type: only transcription is offered, got {session['type']!r:.64}"
        raise EventError("invalid_event", text, "session.type")


def _silence_s(session: Mapping[str, Any], sound: Mapping[str, Any], before: float) -> float:
    """Returns the silence that ends an utterance: `before` if nothing is said about turns, 0 for null. What is left out
    of an object stays as it was. Raises EventError for other ways to detect turns."""
    owner = next((each for each in (sound, session) if "turn_detection" in each), None)
    if owner is None:
        return before
    turns = owner["turn_detection"]
    if turns is None:
        return 0.0
    turns = _object(turns, "turn_detection")
    if turns.get("type", SERVER_VAD) != SERVER_VAD:
        text = f"turn_detection: must be null or of type {SERVER_VAD}, got {turns['type']!r:.64}"
        raise EventError("invalid_event", text, "turn_detection")
    given = turns.get("silence_duration_ms")
    if given is None:
        return before or SILENCE_MS / 1000
    if not isinstance(given, int) or not LEAST_MS <= given <= MOST_MS:
        text = f"silence_duration_ms: must be a whole number from {LEAST_MS} to {MOST_MS}, got {given!r:.64}"
        raise EventError("invalid_event", text, "silence_duration_ms")
    return given / 1000


def _format_rate(form: Any, default: int) -> int:
    """Returns the sampling rate of a format: OpenAI's object, or a name of its beta."""
    if form is None:
        return default
    if isinstance(form, str):
        form = {"type": form}
    form = _object(form, "format")
    if form.get("type", PCM[0]) not in PCM:
        raise EventError("invalid_event", f"format: must be audio/pcm, got {form['type']!r:.64}", "format")
    return _rate(form.get("rate") or default, "format.rate")


def _rate(value: Any, field: str) -> int:
    if not isinstance(value, int) or not LEAST_RATE <= value <= MOST_RATE:
        text = f"{field}: must be a whole number from {LEAST_RATE} to {MOST_RATE}, got {value!r:.64}"
        raise EventError("invalid_event", text, field)
    return value


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise EventError("invalid_event", f"{field}: must be an object, got {value!r:.64}", field)
    return value


def _text(fields: Mapping[str, Any], name: str, default: str) -> str:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or len(value) > MOST_PROMPT:
        raise EventError("invalid_event", f"{name}: must be a text of at most {MOST_PROMPT} characters", name)
    return value
