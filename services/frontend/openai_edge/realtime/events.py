"""Events of /v1/realtime: parsing of those of clients, and the two forms in which the server writes its own."""

from __future__ import annotations

import base64
import binascii
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

Event = dict[str, Any]
EXPECTED = (
    "session.update", "transcription_session.update", "input_audio_buffer.append", "input_audio_buffer.commit",
    "input_audio_buffer.clear",
)  # fmt: skip


class EventError(Exception):
    """Event that is refused, after which the session continues."""

    def __init__(self, code: str, message: str, param: str = "") -> None:
        """`code`: as in vLLM; `param`: field of the event."""
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def parse(message: str) -> Event:
    """Returns the event of a message. Raises EventError for text that is no JSON object with a known type."""
    try:
        event = orjson.loads(message)
    except orjson.JSONDecodeError as error:
        raise EventError("invalid_json", f"the message is not JSON: {error}") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise EventError("invalid_event", "an event is an object with a text `type`", "type")
    if event["type"] not in EXPECTED:
        text = f"type: {event['type']!r:.64} is not an event of this server; it has {', '.join(EXPECTED)}"
        raise EventError("unknown_event", text, "type")
    return event


def sound_of(event: Mapping[str, Any]) -> bytes:
    """Returns the samples of an append event, PCM16. Raises EventError for a value that is not base64 of whole
    samples."""
    audio = event.get("audio")
    if not isinstance(audio, str):
        raise EventError("invalid_audio", "audio: must be base64 of PCM16 samples, little endian, mono", "audio")
    try:
        sound = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError):
        raise EventError("invalid_audio", "audio: is not valid base64", "audio") from None
    if not sound or len(sound) % 2:
        text = f"audio: must have whole samples of two bytes, got {len(sound)} bytes"
        raise EventError("invalid_audio", text, "audio")
    return sound


@dataclass(frozen=True, slots=True)
class SpokenItem:
    """Utterance of a session, by the id that its events name."""

    id: str
    before: str | None = None  # id of the item before it


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


class ServerEvents(Protocol):
    """Form of the events that the server sends."""

    def committed(self, item: SpokenItem) -> list[Event]:
        """Returns the events that confirm the end of an utterance's sound."""

    def delta(self, item: SpokenItem, text: str) -> Event:
        """Returns the event for new text."""

    def completed(self, item: SpokenItem, text: str, seconds: float) -> Event:
        """Returns the event for the whole text of an utterance of this length."""

    def error(self, error: EventError, event_id: str | None) -> Event:
        """Returns the event for an error. `event_id`: as the client named the event that caused it."""


class VllmEvents:
    """ServerEvents of vLLM."""

    def committed(self, item: SpokenItem) -> list[Event]:
        return []

    def delta(self, item: SpokenItem, text: str) -> Event:
        return {"type": "transcription.delta", "delta": text}

    def completed(self, item: SpokenItem, text: str, seconds: float) -> Event:
        usage = {"type": "duration", "seconds": round(seconds, 2)}
        return {"type": "transcription.done", "text": text, "usage": usage}

    def error(self, error: EventError, event_id: str | None) -> Event:
        return {"type": "error", "error": error.message, "code": error.code}


class OpenAiEvents:
    """ServerEvents of OpenAI's transcription sessions."""

    def committed(self, item: SpokenItem) -> list[Event]:
        committed = {
            "type": "input_audio_buffer.committed",
            "event_id": new_id("event"),
            "previous_item_id": item.before,
            "item_id": item.id,
        }
        return [committed]

    def delta(self, item: SpokenItem, text: str) -> Event:
        return self._transcription(item, "delta", delta=text)

    def completed(self, item: SpokenItem, text: str, seconds: float) -> Event:
        usage = {"type": "duration", "seconds": round(seconds, 2)}
        return self._transcription(item, "completed", transcript=text, usage=usage)

    def error(self, error: EventError, event_id: str | None) -> Event:
        described = {
            "type": "server_error" if error.code == "processing_error" else "invalid_request_error",
            "code": error.code,
            "message": error.message,
            "param": error.param or None,
            "event_id": event_id,
        }
        return {"type": "error", "event_id": new_id("event"), "error": described}

    @staticmethod
    def _transcription(item: SpokenItem, what: str, **fields: Any) -> Event:
        return {
            "type": f"conversation.item.input_audio_transcription.{what}",
            "event_id": new_id("event"),
            "item_id": item.id,
            "content_index": 0,
            **fields,
        }


def session_event(what: str, session_id: str, options: Mapping[str, Any]) -> Event:
    """Returns session.created or session.updated, with the fields that clients of both forms read."""
    session = {"id": session_id, "object": "realtime.transcription_session", "type": "transcription", **options}
    event = {"type": f"session.{what}", "event_id": new_id("event"), "session": session}
    return {**event, "id": session_id, "created": int(time.time())} if what == "created" else event
