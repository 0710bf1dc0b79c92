"""Events of /v1/realtime: forms of vLLM's and OpenAI's clients, and errors by field."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from quire.services.frontend.openai_edge.realtime.events import EventError, parse, sound_of
from quire.services.frontend.openai_edge.realtime.options import SessionOptions, updated

START = SessionOptions()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ("[]", "invalid_event"),
        ('{"type": 3}', "invalid_event"),
        ('{"model": "x"}', "invalid_event"),
        ('{"type": "response.create"}', "unknown_event"),
        ('{"type": "conversation.item.create"}', "unknown_event"),
    ],
)
def test_messages_are_refused_by_code(message: str, code: str) -> None:
    with pytest.raises(EventError) as refused:
        parse(message)
    assert refused.value.code == code


@pytest.mark.parametrize("audio", [None, 3, "", "not base64!", "AAA=\n", base64.b64encode(b"odd").decode()])
def test_sound_is_base64_of_whole_samples(audio: Any) -> None:
    with pytest.raises(EventError) as refused:
        sound_of({"audio": audio})
    assert refused.value.code == "invalid_audio"
    assert refused.value.param == "audio"


def test_forms_of_session_update() -> None:
    assert updated(START, {"model": "whisper"}) == SessionOptions("whisper")
    present = {
        "session": {
            "type": "transcription",
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": 24000},
                    "transcription": {"model": "whisper", "language": "DE", "prompt": "Quire"},
                    "turn_detection": None,
                }
            },
        }
    }
    assert updated(START, present) == SessionOptions("whisper", "de", "Quire", 24_000, is_openai=True)
    beta = {
        "session": {"input_audio_format": "pcm16", "input_audio_transcription": {"model": "whisper", "language": "en"}}
    }
    assert updated(START, beta) == SessionOptions("whisper", "en", "", 24_000, is_openai=True)
    assert updated(updated(START, present), {"session": {}}).language == "de", "what is not stated stays"


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ({"session": []}, "session"),
        ({"session": {"type": "realtime"}}, "session.type"),
        ({"session": {"audio": 3}}, "session.audio"),
        ({"session": {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}}, "format"),
        ({"session": {"input_audio_format": "g711_ulaw"}}, "format"),
        ({"session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 1}}}}}, "format.rate"),
        ({"session": {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}}, "turn_detection"),
        ({"session": {"turn_detection": {"silence_duration_ms": 5}}}, "silence_duration_ms"),
        ({"session": {"audio": {"input": {"transcription": {"prompt": "x" * 5000}}}}}, "prompt"),
        ({"model": 3}, "model"),
    ],
)
def test_options_are_refused_by_field(event: dict[str, Any], param: str) -> None:
    with pytest.raises(EventError) as refused:
        updated(START, event)
    assert (refused.value.code, refused.value.param) == ("invalid_event", param)
    orjson.dumps(refused.value.message)


def test_turns_are_detected_if_asked() -> None:
    """Updates of a part keep the rest: sglang-omni#385 lost the type with {"threshold": 0.8}."""
    on = updated(START, {"session": {"turn_detection": {"type": "server_vad", "silence_duration_ms": 700}}})
    assert on.silence_s == 0.7
    assert updated(on, {"session": {"turn_detection": {"threshold": 0.8}}}).silence_s == 0.7
    assert updated(on, {"session": {"input_audio_transcription": {"language": "en"}}}).silence_s == 0.7
    assert updated(on, {"session": {"audio": {"input": {"turn_detection": None}}}}).silence_s == 0.0
    assert updated(START, {"session": {"turn_detection": {"type": "server_vad"}}}).silence_s == 0.5


def test_the_beta_s_event_is_known() -> None:
    """Clients of the beta send transcription_session.update (openai-python#2253)."""
    event = parse(
        '{"type": "transcription_session.update", "session": {"input_audio_format": "pcm16",'
        '"input_audio_transcription": {"model": "whisper", "language": "de"}, "turn_detection": {"type": "server_vad",'
        '"threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 500}}}'
    )
    assert updated(START, event) == SessionOptions("whisper", "de", "", 24_000, is_openai=True, silence_s=0.5)
