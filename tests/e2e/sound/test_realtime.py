"""WebSocket /v1/realtime through a whole cluster: events of vLLM's and OpenAI's clients, bounds, and clients that
leave."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.sound.served import RATE, Served
from tests.shared.media.audio.files import noise
from tests.waiting import eventually

client = pytest.importorskip("websockets.sync.client")
exceptions = pytest.importorskip("websockets.exceptions")

pytestmark = pytest.mark.timeout(300)

PIECE = RATE // 5


class Connection:
    """One session, as a program has it."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def send(self, type: str, **fields: Any) -> None:
        self._socket.send(json.dumps({"type": type, **fields}))

    def raw(self, message: str | bytes) -> None:
        self._socket.send(message)

    def next(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self._socket.recv(timeout=120))
        return event

    def speak(self, samples: np.ndarray) -> None:
        """Sends samples in pieces of 0.2 s."""
        pcm = (samples * 32767).astype("<i2")
        for start in range(0, len(pcm), PIECE):
            piece = base64.b64encode(pcm[start : start + PIECE].tobytes()).decode()
            self.send("input_audio_buffer.append", audio=piece)

    def until(self, type: str) -> list[dict[str, Any]]:
        """Returns the events up to the next one of a type."""
        found = [self.next()]
        while found[-1]["type"] != type:
            found.append(self.next())
        return found


@contextlib.contextmanager
def session(served: Served, path: str = "/v1/realtime", **options: Any) -> Iterator[Connection]:
    url = served.base_url.replace("http://", "ws://") + path
    with client.connect(url, **options) as socket:
        connection = Connection(socket)
        created = connection.next()
        assert created["type"] == "session.created"
        assert created["session"]["id"] == created["id"]
        yield connection


def test_a_session_of_vllm(served: Served) -> None:
    with session(served) as live:
        live.send("session.update", model="", language="en")
        assert live.next()["type"] == "session.updated"
        live.send("input_audio_buffer.append", audio=base64.b64encode(bytes(100)).decode())
        live.send("input_audio_buffer.commit")
        live.speak(noise(2 * RATE))
        live.send("input_audio_buffer.commit", final=True)
        *deltas, done = live.until("transcription.done")
        assert {each["type"] for each in deltas} == {"transcription.delta"}
        assert "".join(each["delta"] for each in deltas) == done["text"] != ""
        assert done["usage"] == {"type": "duration", "seconds": 2.0}
        live.speak(noise(RATE // 2))
        live.send("input_audio_buffer.commit", final=True)
        assert live.until("transcription.done")[-1]["usage"]["seconds"] == 0.5, "another utterance of the session"


def test_text_comes_before_the_end_of_the_sound(served: Served) -> None:
    with session(served) as live:
        live.send("session.update", model="", language="en")
        live.next()
        live.speak(noise(6 * RATE, level=0.3))  # windows of this model have a second
        assert live.next()["type"] == "transcription.delta"


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")  # by openai
def test_openais_client(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none") as api:
        model = api.models.list().data[0].id
        with api.realtime.connect(model=model, extra_query={"intent": "transcription"}) as live:
            assert live.recv().type == "session.created"
            sound: dict[str, Any] = {
                "format": {"type": "audio/pcm", "rate": 24000},
                "transcription": {"model": model, "language": "en"},
            }
            live.session.update(session={"type": "transcription", "audio": {"input": sound}})
            assert live.recv().type == "session.updated"
            pcm = (noise(24_000) * 32767).astype("<i2").tobytes()
            for start in range(0, len(pcm), 9600):
                live.input_audio_buffer.append(audio=base64.b64encode(pcm[start : start + 9600]).decode())
            live.input_audio_buffer.commit()
            text, ids = "", set()
            for event in live:
                if event.type == "conversation.item.input_audio_transcription.delta":
                    text += event.delta or ""
                if event.type == "input_audio_buffer.committed":
                    ids.add(event.item_id)
                if event.type == "conversation.item.input_audio_transcription.completed":
                    break
            assert event.transcript == text != ""
            assert ids == {event.item_id}
            assert event.usage.seconds == 1.0
            live.input_audio_buffer.commit()
            refused = live.recv()
            assert refused.type == "error"
            assert "the input audio buffer is empty" in refused.error.message


def test_events_are_refused_and_the_session_goes_on(served: Served) -> None:
    with session(served) as live:
        for message, code in (
            ("no json", "invalid_json"),
            ("[1]", "invalid_event"),
            (b"\x00\x01", "invalid_event"),
            ('{"type": "response.create"}', "unknown_event"),
            ('{"type": "input_audio_buffer.append", "audio": "AAAA"}', "invalid_audio"),
            ('{"type": "input_audio_buffer.append", "audio": "AAAAAA=="}', "model_not_validated"),
            ('{"type": "input_audio_buffer.commit"}', "model_not_validated"),
            ('{"type": "session.update", "model": "other"}', "model_not_found"),
            ('{"type": "input_audio_buffer.commit"}', "model_not_validated"),  # a refused model is none (vllm#36399)
            ('{"type": "session.update", "session": {"type": "realtime"}}', "invalid_event"),  # litellm#15959
            ('{"type": "session.update", "language": "xx"}', "invalid_event"),
        ):
            live.raw(message)
            event = live.next()
            assert (event["type"], event.get("code")) == ("error", code), event
            assert event["error"]
        live.send("session.update", model="", language="en")
        assert live.next()["type"] == "session.updated"


def test_connections_are_checked_like_calls(served: Served) -> None:
    """Pages of other sites open WebSockets without CORS: the Origin is all there is."""
    for path, options, status in (
        ("/v1/realtime", {"origin": "https://evil.example"}, 403),
        ("/v1/realtime?model=other", {}, 404),
        ("/v1/models", {}, 200),  # an offer to upgrade is ignored elsewhere
    ):
        with pytest.raises(exceptions.InvalidStatus) as refused, session(served, path, **options):
            pass
        assert refused.value.response.status_code == status
    plain = served.http.get("/v1/realtime")
    assert (plain.status_code, plain.headers["upgrade"]) == (426, "websocket")
    assert "open a WebSocket" in plain.json()["error"]["message"]


def test_a_message_is_bounded(served: Served) -> None:
    with session(served) as live:
        with contextlib.suppress(exceptions.ConnectionClosed):
            live.raw("x" * (5 << 20))
        with pytest.raises(exceptions.ConnectionClosedError):
            live.next()


def test_a_client_has_a_few_sessions(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(session(served))
        with pytest.raises(exceptions.InvalidStatus) as refused:
            stack.enter_context(session(served))
    assert refused.value.response.status_code == 429
    assert b"at most 8 sessions" in refused.value.response.body


@pytest.mark.asyncio
async def test_a_client_that_leaves_frees_everything(served: Served) -> None:
    """A session ends with its client (vLLM's realtime leaked the engine's request)."""
    url = served.base_url.replace("http://", "ws://") + "/v1/realtime"
    for _ in range(4):
        with client.connect(url) as socket:
            live = Connection(socket)
            live.next()
            live.send("session.update", model="")
            live.speak(noise(3 * RATE))
            socket.socket.close()  # without a closing handshake
    await eventually(lambda: served.http.get("/load").json() == {"server_load": 0})

    def is_idle() -> bool:
        assert served.cluster.metrics is not None
        page = served.cluster.metrics.text().splitlines()
        counts = [line for line in page if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))]
        return bool(counts) and all(line.endswith(" 0.0") for line in counts)

    await eventually(is_idle)

    def is_free() -> bool:
        """Returns whether a client may open all of its sessions."""
        with contextlib.suppress(exceptions.InvalidStatus), contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(session(served))
            return True
        return False

    await eventually(is_free)


def test_a_commit_before_the_sound_starts_nothing_and_ends_nothing(served: Served) -> None:
    """Clients of vLLM's realtime commit first and append then (suitenumerique/meet#1277)."""
    with session(served) as live:
        live.send("session.update", model="", language="en")
        live.next()
        live.send("input_audio_buffer.commit")
        live.speak(noise(RATE // 2))
        live.send("input_audio_buffer.commit", final=True)
        assert live.until("transcription.done")[-1]["text"]


def test_utterances_end_at_silence_if_turns_are_detected(served: Served) -> None:
    with session(served, "/v1/realtime?intent=transcription") as live:
        turns = {"type": "server_vad", "silence_duration_ms": 300}
        live.send("session.update", session={"audio": {"input": {"format": {"rate": RATE}, "turn_detection": turns}}})
        assert live.next()["session"]["audio"]["input"]["turn_detection"] == turns
        for _ in range(2):
            live.speak(np.concatenate([noise(RATE // 2, level=0.3), np.zeros(RATE // 2, np.float32)]))
        done = "conversation.item.input_audio_transcription.completed"
        first, second = live.until(done), live.until(done)
        items = [event["item_id"] for event in (*first, *second) if event["type"] == "input_audio_buffer.committed"]
        assert len(set(items)) == len(items) == 2
        assert [first[-1]["item_id"], second[-1]["item_id"]] == items


def test_a_session_ends_with_a_closing_handshake(served: Served) -> None:
    """A close without an answer is shown to users as an error (N.E.K.O#2900)."""
    url = served.base_url.replace("http://", "ws://") + "/v1/realtime"
    with client.connect(url) as socket:
        socket.recv()
        socket.close(1000)
    assert socket.close_code == 1000


def test_a_new_session_has_nothing_of_an_earlier_one(served: Served) -> None:
    """Output of a client that had left reached the next one (speech-to-speech#226)."""
    with session(served) as live:
        live.send("session.update", model="", language="en")
        live.speak(noise(2 * RATE))
    with session(served) as live:
        live.send("session.update", model="", language="en")
        live.send("input_audio_buffer.commit", final=True)
        assert live.next()["type"] == "session.updated"
        assert live.next()["code"] == "invalid_event", "its buffer is empty"


def test_a_path_that_is_written_twice_gets_a_hint(served: Served) -> None:
    """Base URLs that end with the path (VideoCaptioner#724)."""
    answer = served.http.post("/v1/audio/transcriptions/audio/transcriptions")
    assert answer.status_code == 404
    assert "did you mean /v1/audio/transcriptions?" in answer.json()["error"]["message"]
