"""Transcriptions through a whole cluster: the text of transformers' Whisper, in every format, and errors by field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.page import output_of
from tests.e2e.sound.served import ONCE, RATE, Served, floats
from tests.shared.media.audio.files import encoded, noise, wav

pytestmark = pytest.mark.timeout(300)


def test_a_clip_has_the_text_of_transformers(served: Served) -> None:
    clip = noise(14_000)
    for language in ("en", "de"):
        answer = served.send(floats(clip), language=language, max_completion_tokens=12)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {
            "text": served.expected(clip, language, 12),
            "usage": {"type": "duration", "seconds": 1},
        }
    translated = served.send(floats(clip), "translations", language="de", max_completion_tokens=12)
    assert translated.json()["text"] == served.expected(clip, "de", 12, "<|translate|>")


def test_the_language_is_found_and_stated(served: Served) -> None:
    answer = served.send(floats(noise(14_000)), response_format="verbose_json", max_completion_tokens=12).json()
    assert answer["language"] in ("en", "de", "ja")
    assert answer["duration"] == pytest.approx(14_000 / RATE)
    named = served.send(floats(noise(14_000)), response_format="verbose_json", language=answer["language"])
    assert named.json()["language"] == answer["language"]


def test_formats_and_their_types(served: Served) -> None:
    file = floats(noise(14_000))
    given = {"language": "en", "max_completion_tokens": 12}
    plain = served.send(file, response_format="text", **given)
    assert plain.headers["content-type"] == "text/plain; charset=utf-8"
    assert plain.text == served.expected(noise(14_000), "en", 12) + "\n"
    srt = served.send(file, response_format="srt", **given)
    assert srt.headers["content-type"] == "text/plain; charset=utf-8"
    assert re.match(r"1\n00:00:00,\d{3} --> 00:00:00,\d{3}\n\S", srt.text)
    vtt = served.send(file, response_format="vtt", **given)
    assert vtt.headers["content-type"] == "text/vtt; charset=utf-8"
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.")


def test_long_sound_is_joined_from_its_pieces_and_silence_is_left_out(served: Served) -> None:
    first, second = noise(12_000), noise(12_000, seed=2)
    pause = np.zeros(RATE // 2, np.float32)
    sound = np.concatenate([first, pause, second, np.zeros(3 * RATE, np.float32)])
    answer = served.send(floats(sound), response_format="verbose_json", language="en", max_completion_tokens=8).json()
    assert answer["duration"] == pytest.approx(len(sound) / RATE)
    segments = answer["segments"]
    assert answer["text"] == " ".join(segment["text"] for segment in segments)
    times = [time for segment in segments for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert any(segment["start"] > 0.8 for segment in segments)
    assert all(segment["end"] < 2.4 for segment in segments), "three seconds of silence have no text"
    japanese = served.send(floats(sound), language="ja", max_completion_tokens=8).json()["text"]
    assert len(japanese)


def test_silence_has_no_text(served: Served) -> None:
    for fields in ({}, {"language": "en"}):
        answer = served.send(wav(np.zeros(5 * RATE, np.float32), RATE), **fields)
        assert answer.json() == {"text": "", "usage": {"type": "duration", "seconds": 5}}
    assert served.send(wav(np.zeros(RATE, np.float32), RATE), response_format="vtt").text == "WEBVTT\n"


def test_other_rates_and_channels(served: Served) -> None:
    both = np.repeat(noise(40_000)[:, None], 2, axis=1)
    assert served.send(wav(both, 48_000), language="en", max_completion_tokens=4).status_code == 200
    assert served.send(wav(noise(6_000), 8_000), language="en", max_completion_tokens=4).status_code == 200


def test_a_stream_has_the_text_of_the_whole_answer(served: Served) -> None:
    pause = np.zeros(RATE // 2, np.float32)
    clips = [noise(12_000, seed=number) for number in range(4)]
    sound = floats(np.concatenate([part for clip in clips for part in (clip, pause)]))
    given = {"language": "en", "max_completion_tokens": 6}
    whole = served.send(sound, **given).json()
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none") as client:
        *deltas, last = client.audio.transcriptions.create(
            file=("clip.wav", sound), model="", language="en", temperature=float(ONCE), stream=True,
            extra_body={"max_completion_tokens": 6},
        )  # fmt: skip
    assert {each.type for each in deltas} == {"transcript.text.delta"}
    assert len(deltas) >= 3, "one piece, one piece, two pieces"
    assert "".join(each.delta for each in deltas) == whole["text"]
    assert (last.type, last.text) == ("transcript.text.done", whole["text"])
    silent = served.send(wav(np.zeros(RATE, np.float32), RATE), stream="true").text
    assert '"text":""' in silent
    assert "delta" not in silent
    broken = served.send(b"no sound", stream="true")
    assert (broken.status_code, "none of wav, mp3" in broken.text) == (400, True)


def test_words_have_times_that_rise(served: Served) -> None:
    given = {"language": "en", "max_completion_tokens": 10, "response_format": "verbose_json"}
    file = floats(noise(14_000))
    for asked, segments in ((["word"], False), (["word", "segment"], True)):
        answer = served.send(file, **given, **{"timestamp_granularities[]": asked}).json()
        assert ("segments" in answer) == segments
        times = [time for word in answer["words"] for time in (word["start"], word["end"])]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= 0.88
        assert "".join(word["word"] for word in answer["words"]) == answer["text"].replace(" ", "")
    assert "words" not in served.send(file, **given).json()
    subtitles = served.send(file, **{**given, "response_format": "vtt", "timestamp_granularities[]": "word"}).text
    assert subtitles.count("-->") == len(answer["words"])


def test_segments_follow_the_rules_of_time_stamps(served: Served) -> None:
    """vllm#55281: with a prompt, the segments collapsed; random weights write no whole segment without the rules."""
    for prompt in ("", "a list of names and terms", "<|startoftranscript|><|0.00|>"):
        fields = {"prompt": prompt, "language": "en", "response_format": "verbose_json", "max_completion_tokens": 30}
        segments = served.send(floats(noise(14_000)), **fields).json()["segments"]
        assert all(segment["start"] <= segment["end"] for segment in segments)
        starts = [segment["start"] for segment in segments]
        assert starts == sorted(starts)


def test_text_before_and_hot_words_change_the_output(served: Served) -> None:
    file = floats(noise(14_000))
    given = {"language": "en", "max_completion_tokens": 12}

    def logprobs(sound: bytes, **fields: Any) -> list[float]:
        segments = served.send(sound, response_format="verbose_json", **given, **fields).json()["segments"]
        return [segment["avg_logprob"] for segment in segments]

    plain = logprobs(file)
    for name in ("prompt", "hotwords"):
        assert logprobs(file, **{name: "Quire transcribes"}) != pytest.approx(plain, abs=1e-4), name
        assert logprobs(file, **{name: " "}) == pytest.approx(plain, abs=1e-4), name
    sound = floats(np.concatenate([noise(12_000), np.zeros(4 * RATE, np.float32), noise(12_000, seed=2)]))
    before, alone = (logprobs(sound, condition_on_previous_text=flag) for flag in ("true", "false"))
    assert before[0] == pytest.approx(alone[0], abs=1e-4), "the first piece has no text before it"
    assert before[-1] != pytest.approx(alone[-1], abs=1e-4)


def test_of_guesses_the_best_one_is_taken(served: Served) -> None:
    answer = served.send(
        floats(noise(14_000)), response_format="verbose_json", language="en", temperature="0", max_completion_tokens=6
    ).json()
    assert len({segment["temperature"] for segment in answer["segments"]}) == 1
    assert all(segment["avg_logprob"] < -1 for segment in answer["segments"]), "the best of several guesses"


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"response_format": "yaml"}, 400, "response_format: must be one of json, text, srt, verbose_json, vtt"),
        ({"language": "xx"}, 400, "language: 'xx' is not a language of this model; it has de, en, ja"),
        ({"temperature": "2"}, 400, "temperature: must be a number from 0.0 to 1.0, got '2'"),
        ({"temperature": "hot"}, 400, "temperature: must be a number"),
        ({"stream": "maybe"}, 400, "stream: must be true or false, got 'maybe'"),
        ({"stream": "true", "response_format": "srt"}, 400, "stream: needs response_format json or text, got srt"),
        ({"stream_include_usage": "true"}, 400, "Stream options can only be defined when `stream=True`."),
        ({"timestamp_granularities[]": "word"}, 400, "needs response_format verbose_json, srt or vtt, got json"),
        (
            {"response_format": "verbose_json", "timestamp_granularities[]": "letter"},
            400,
            "timestamp_granularities[]: must be segment or word, got 'letter'",
        ),
        ({"condition_on_previous_text": "2"}, 400, "condition_on_previous_text: must be true or false, got '2'"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, 400, "chunking_strategy: must be auto, got"),
        ({"top_k": "5"}, 400, "top_k: not supported for transcriptions; leave it out"),
        ({"model": "other"}, 404, "The model `other` does not exist"),
    ],
)
def test_fields_are_refused_by_name(served: Served, fields: dict[str, str], status: int, text: str) -> None:
    answer = served.send(floats(noise(8_000)), **fields)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text


def test_files_are_refused_in_clear_words(served: Served) -> None:
    assert "the form must have a sound file" in served.send(None).text
    text = served.http.post("/v1/audio/transcriptions", files={"file": (None, "clip.wav")})
    assert "Expected 'file' to be a file-like object, not 'str'." in text.text
    assert "files must be sent as multipart/form-data" in served.http.post("/v1/audio/transcriptions", json={}).text
    for file, reason in ((b"no sound", "none of wav, mp3"), (b"", "not empty"), (wav(noise(10), RATE)[:20], "cut off")):
        answer = served.send(file)
        assert answer.status_code == 400
        assert reason in answer.text
    large = served.send(bytes(26 << 20))
    assert large.status_code == 413, "the server's limit of bodies is lower"


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client's own types
def test_openais_client_reads_the_answers(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none")
    model = client.models.list().data[0].id
    given: dict[str, Any] = {"model": model, "language": "en", "temperature": float(ONCE)}
    file = ("clip.wav", floats(noise(14_000)))
    assert client.audio.transcriptions.create(file=file, **given).text
    verbose = client.audio.transcriptions.create(file=file, response_format="verbose_json", **given)
    assert verbose.segments is not None
    assert verbose.duration == pytest.approx(0.875)
    assert isinstance(client.audio.transcriptions.create(file=file, response_format="srt", **given), str)
    given.pop("language")
    assert client.audio.translations.create(file=file, **given).text


def test_the_command_of_the_page_is_answered(served: Served, tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "speech.mp3").write_bytes(encoded(noise(14_000), RATE, "mp3", "mp3"))
    subtitles = output_of("/v1/audio/transcriptions", served.base_url, tmp_path)
    assert re.match(r"1\n00:00:00,\d{3} --> 00:00:0\d,\d{3}\n\S", subtitles)
