"""Files that are too long, empty of speech or not what they say, and decoders that die."""

from __future__ import annotations

import os
import signal
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quire import Client
from quire.shared.errors import InvalidArgument
from tests.e2e.sound.served import RATE, Served, floats
from tests.shared.media.audio.files import noise, tone, wav
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)

TWO_HOURS = wav(np.zeros(7200 * 1000, np.float32), 1000, bits=8)  # 7 MiB
DATA = 36  # offset of the data chunk in a file of the standard library
RATE_AT, CHANNELS_AT, BITS_AT = 24, 22, 34
LIES = (
    (RATE_AT, "<I", 0),
    (RATE_AT, "<I", 0xFFFFFFFF),
    (CHANNELS_AT, "<H", 0),
    (CHANNELS_AT, "<H", 65_535),
    (BITS_AT, "<H", 0),
)


def changed(file: bytes, offset: int, form: str, value: int) -> bytes:
    """Returns a WAV file with another number in its header."""
    return file[:offset] + struct.pack(form, value) + file[offset + struct.calcsize(form) :]


def test_two_hours_are_refused_by_their_header(served: Served) -> None:
    """Recordings of two hours are what users send (speakr#42, subtitleedit#11147)."""
    answer = served.send(TWO_HOURS)
    assert answer.status_code == 400
    assert "1500 s" in answer.json()["error"]["message"]
    with Client(served.cluster.grpc_address) as client, pytest.raises(InvalidArgument, match="1500 s"):
        client.transcribe(TWO_HOURS)


def test_a_file_above_the_limit_is_refused_in_the_api_s_form(served: Served) -> None:
    """Clients show the error object of a 413 (speechdigest#1, with this size)."""
    answer = served.send(bytes(26_306_794))
    assert answer.status_code == 413
    assert "bytes" in answer.json()["error"]["message"]
    assert served.send(floats(noise(8_000)), language="en", max_completion_tokens=4).status_code == 200


@pytest.mark.parametrize(
    "sound",
    [
        wav(np.zeros(30 * RATE, np.float32), RATE),
        wav(tone(30_000, 2.0, 96_000), 96_000),  # above what the model's rate can represent
    ],
    ids=["zeros", "ultrasound"],
)
def test_sound_without_speech_has_no_text(served: Served, sound: bytes) -> None:
    assert served.send(sound).json()["text"] == ""
    assert served.send(sound, response_format="srt").text == ""


def test_headers_that_lie_change_nothing_but_what_they_say(served: Served) -> None:
    given = {"language": "en", "max_completion_tokens": 6}
    file = wav(noise(9_000), RATE)
    expected = served.send(file, **given).json()["text"]
    for size in (0, 0xFFFFFFFF, 10_000_000):  # of a pipe; not known; more than there is
        assert served.send(changed(file, DATA + 4, "<I", size), **given).json()["text"] == expected
    for offset, form, value in (
        (24, "<I", 0),
        (24, "<I", 0xFFFFFFFF),
        (22, "<H", 0),
        (22, "<H", 65_535),
        (34, "<H", 0),
    ):
        answer = served.send(changed(file, offset, form, value), **given)
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (400, True), (offset, value)
    assert served.send(file[:43]).status_code == 400


def decoders(served: Served) -> list[int]:
    """Returns the processes of the frontend that decode."""
    parent = served.cluster.process("frontend-0").pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if b"decoder_process" in Path(f"/proc/{child}/cmdline").read_bytes()]


def num_decoding(served: Served) -> int:
    """Returns the files that wait for a decoder or are in one."""
    page = served.http.get("/metrics").text.splitlines()
    return int(float(next(line for line in page if line.startswith("quire_frontend_media_waiting")).split()[-1]))


def test_a_decoder_that_is_killed_costs_nothing(served: Served) -> None:
    given = {"language": "en", "max_completion_tokens": 4}
    speech = np.concatenate([noise(12_000), np.zeros(1200 * 8_000, np.float32)])  # long to decode
    file = wav(speech, 8_000)
    expected = served.send(file, **given).json()["text"]
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(served.send, file, **given)
        until(lambda: num_decoding(served) > 0 or asked.done())
        assert not asked.done()
        for number in decoders(served):
            os.kill(number, signal.SIGKILL)
        assert asked.result().json()["text"] == expected
    assert num_decoding(served) == 0
