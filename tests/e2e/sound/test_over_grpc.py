"""InferenceService.Transcribe and the Python API: the text of the HTTP form, errors by field, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire import LLM, AsyncClient, Client
from quire.requests import RequestOptions
from quire.shared.errors import DeadlineExceeded, InvalidArgument, NotFound, QuireError, Unimplemented
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from tests.e2e.sound.served import ONCE, RATE, Served, floats
from tests.shared.media.audio.files import noise, wav
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

PAUSE = np.zeros(RATE // 2, np.float32)
GIVEN: dict[str, Any] = {"language": "en", "max_completion_tokens": 6, "temperature": float(ONCE)}
FORM = {"language": "en", "max_completion_tokens": 6}


def long_sound(num_pieces: int = 4) -> np.ndarray:
    return np.concatenate([part for seed in range(num_pieces) for part in (noise(12_000, seed=seed), PAUSE)])


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Client]:
    with Client(served.cluster.grpc_address) as connected:
        yield connected


def test_the_text_is_that_of_the_http_form(served: Served, client: Client) -> None:
    sound = floats(long_sound())
    whole = client.transcribe(sound, **GIVEN)
    assert whole.text == served.send(sound, **FORM).json()["text"]
    assert (whole.language, whole.task) == ("en", "transcribe")
    assert whole.seconds == pytest.approx(len(long_sound()) / RATE)
    timed = client.transcribe(sound, **GIVEN, timestamp_granularities=["segment"])
    answer = served.send(sound, response_format="verbose_json", **FORM).json()
    assert [(round(each.start, 3), round(each.end, 3), each.text) for each in timed.segments] == [
        (round(each["start"], 3), round(each["end"], 3), each["text"]) for each in answer["segments"]
    ]
    assert [each.token_ids for each in timed.segments] == [tuple(each["tokens"]) for each in answer["segments"]]


def test_the_text_comes_in_parts_that_join_to_the_whole(client: Client) -> None:
    *parts, last = client.stream_transcription(floats(long_sound()), RequestOptions(request_id="mine"), **GIVEN)
    assert len(parts) >= 3, "one piece, one piece, two pieces"
    assert last.done is not None
    assert "".join(part.text for part in parts) == last.done.text
    assert last.text == ""
    assert {part.seconds for part in parts} == {last.seconds}
    ends = [segment.end for part in parts for segment in part.segments]
    assert ends == sorted(ends)


def test_translation_and_detection(served: Served, client: Client) -> None:
    sound = floats(noise(14_000))
    given = {**GIVEN, "language": "de", "max_completion_tokens": 12}
    assert client.transcribe(sound, translate=True, **given).text == served.expected(
        noise(14_000), "de", 12, "<|translate|>"
    )
    found = client.transcribe(sound, temperature=float(ONCE), max_completion_tokens=6)
    assert found.language in ("en", "de", "ja")


def test_silence_has_no_text(client: Client) -> None:
    assert client.transcribe(wav(np.zeros(2 * RATE, np.float32), RATE)).text == ""


@pytest.mark.parametrize(
    ("extras", "kind", "text"),
    [
        ({"language": "xx"}, InvalidArgument, "language: 'xx' is not a language of this model; it has de, en, ja"),
        ({"temperature": 2.0}, InvalidArgument, "temperature: must be a number from 0.0 to 1.0, got '2.0'"),
        ({"timestamp_granularities": ["line"]}, InvalidArgument, "must be segment or word, got 'line'"),
        ({"max_completion_tokens": 0}, InvalidArgument, "max_completion_tokens: must be a number from 1"),
        ({"top_k": 3}, InvalidArgument, "top_k is not an option of transcriptions; available: language"),
    ],
)
def test_options_are_refused_by_name(client: Client, extras: dict[str, Any], kind: type[QuireError], text: str) -> None:
    with pytest.raises(kind, match=text):
        client.transcribe(floats(noise(8_000)), **extras)


def test_other_sources_and_models(client: Client, tmp_path: Path) -> None:
    clip = noise(14_000)
    (tmp_path / "clip.wav").write_bytes(floats(clip))
    texts = {
        client.transcribe(each, **GIVEN).text for each in (tmp_path / "clip.wav", (clip, RATE), clip, floats(clip))
    }
    assert len(texts) == 1, "a path, a pair, an array of 16 kHz, bytes"
    with pytest.raises(InvalidArgument, match="URLs are not fetched for a transcription"):
        client.transcribe("https://example.com/clip.wav")
    with pytest.raises(InvalidArgument, match="cannot read"):
        client.transcribe(tmp_path / "absent.wav")
    with pytest.raises(InvalidArgument, match="none of wav, mp3"):
        client.transcribe(b"no sound")
    with pytest.raises(NotFound, match="other"):
        client.transcribe(clip, RequestOptions(model="other"))


def _violations(error: Any) -> list[Any]:
    """Returns the fields that an error names."""
    status = rpc_status.from_call(error)
    assert status is not None
    found = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(found)
    return list(found.field_violations)


OPTIONS = pb.TranscribeRequest(options=pb.TranscriptionOptions(language="en"))


@pytest.mark.parametrize(
    ("messages", "field", "text"),
    [
        ([], "options", "the first message must have the options"),
        ([pb.TranscribeRequest(content=b"RIFF")], "options", "the first message must have the options"),
        ([OPTIONS], "content", "the stream has no sound file"),
        ([OPTIONS, OPTIONS], "content", "every message after the first must have content"),
        ([OPTIONS, pb.TranscribeRequest()], "content", "every message after the first must have content"),
        (
            [pb.TranscribeRequest(options=pb.TranscriptionOptions(content_bytes=65 << 20))],
            "content",
            "at most 64 MiB",
        ),
        (
            [
                pb.TranscribeRequest(options=pb.TranscriptionOptions(content_bytes=9)),
                pb.TranscribeRequest(content=b"RIFF"),
            ],
            "content_bytes",
            "9 were announced, 4 received",
        ),
        (
            [
                pb.TranscribeRequest(options=pb.TranscriptionOptions(content_bytes=2)),
                pb.TranscribeRequest(content=b"RIFF"),
            ],
            "content_bytes",
            "2 were announced, more than 2 received",
        ),
    ],
)
def test_streams_of_another_form_are_refused(
    served: Served, messages: list[pb.TranscribeRequest], field: str, text: str
) -> None:
    with grpc.insecure_channel(served.cluster.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Transcribe(iter(messages))
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert text in refused.value.details()
    (violation,) = _violations(refused.value)
    assert violation.field == field


@pytest.mark.asyncio
async def test_a_client_that_leaves_frees_everything(served: Served) -> None:
    """Checks that a call does not run on after its client has gone."""
    async with AsyncClient(served.cluster.grpc_address) as client:
        async for part in client.stream_transcription(floats(long_sound(24)), **{**GIVEN, "max_completion_tokens": 60}):
            assert part.done is None
            break
    await eventually(lambda: served.http.get("/load").json() == {"server_load": 0})
    running = "vllm:num_requests_running"

    def is_idle() -> bool:
        page = served.cluster.metrics
        assert page is not None
        lines = [line for line in page.text().splitlines() if line.startswith((running, "vllm:num_requests_waiting{"))]
        return bool(lines) and all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines)

    await eventually(is_idle)


def test_the_deadline_ends_the_call(served: Served, client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.transcribe(floats(long_sound(40)), timeout_s=0.05, **GIVEN)
    assert client.transcribe(floats(noise(8_000)), **GIVEN).text


def test_llm_transcribes_several_files_in_order(served: Served) -> None:
    clips = [noise(9_000, seed=seed) for seed in range(3)]
    with LLM(address=served.cluster.grpc_address) as llm:
        found = llm.transcribe([*clips, (clips[0], RATE)], **GIVEN)
        assert [each.text for each in found] == [
            served.send(floats(clip), **FORM).json()["text"] for clip in (*clips, clips[0])
        ]
        assert len(llm.transcribe((clips[0], RATE), **GIVEN)) == 1, "a pair is one clip"
        with pytest.raises(InvalidArgument, match="none of wav, mp3"):
            llm.transcribe([clips[0], b"no sound"], **GIVEN)


def test_a_model_without_sound_refuses_by_name() -> None:
    with LLM() as llm, pytest.raises(Unimplemented, match="does not transcribe; serve one of Whisper's"):
        llm.transcribe(noise(8_000))
