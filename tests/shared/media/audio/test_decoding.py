"""Files of all formats become the sound that was written; hostile ones are refused."""

from __future__ import annotations

import struct
import sys
import time

import numpy as np
import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.media.audio.decoding import AudioBounds, decode, decode_file, demuxer
from tests.shared.media.audio.files import coded_wav, encoded, noise, tone, wav

SECONDS = 1.0
# container and codec of FFmpeg -> largest error of a tone at half level
CODED = {
    ("flac", "flac"): 1e-4,
    ("mp3", "libmp3lame"): 0.03,
    ("ogg", "libopus"): 0.03,
    ("ipod", "aac"): 0.03,
    ("webm", "libopus"): 0.03,
    ("adts", "aac"): 0.03,
}

OTHER_FILES = [b"", bytes(4096), b"GIF89a" + bytes(64), b"#EXTM3U\nhttp://127.0.0.1/a.ts\n", b"RIFF"]
STARTS = (b"fLaC", b"OggS", b"\x1aE\xdf\xa3", b"ID3\x04", b"\xff\xfb\x90", b"\xff\xf1\x50", b"\0\0\0\x20ftypM4A ")


def _refusal(file: bytes) -> str:
    """Returns the text with which a file is refused; empty if it is decoded, then to finite samples."""
    try:
        samples = decode(file, 16_000)
    except InvalidArgument as error:
        return error.message
    assert np.isfinite(samples).all()
    return ""


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_wav_of_any_depth_is_read(bits: int, channels: int) -> None:
    samples = tone(300, 0.1, 16_000)
    file = wav(np.repeat(samples[:, None], channels, axis=1), 16_000, bits)
    np.testing.assert_allclose(decode(file, 16_000), samples, atol=max(2.0 ** (2 - bits), 1e-7))


def test_floats_and_telephone_codings_are_read() -> None:
    samples = tone(300, 0.1, 8_000)
    for bits, kind in ((32, "<f4"), (64, "<f8")):
        found = decode_file(coded_wav(3, bits, samples.astype(kind).tobytes()))
        np.testing.assert_array_equal(found.samples, samples)
    assert decode_file(coded_wav(7, 8, bytes([0xFF, 0x00, 0x80]))).samples == pytest.approx([0, -0.98, 0.98], abs=0.01)
    assert decode_file(coded_wav(6, 8, bytes([0xD5, 0x2A, 0xAA]))).samples == pytest.approx([0, -0.98, 0.98], abs=0.01)


def test_broken_floats_become_finite() -> None:
    data = np.array([np.nan, np.inf, -np.inf, 0.25], "<f4").tobytes()
    np.testing.assert_array_equal(decode_file(coded_wav(3, 32, data)).samples, [0, 1, -1, 0.25])


def test_two_channels_are_averaged() -> None:
    both = np.stack([tone(300, 0.1, 16_000), np.zeros(1600, np.float32)], axis=1)
    np.testing.assert_allclose(decode(wav(both, 16_000), 16_000), tone(300, 0.1, 16_000) / 2, atol=1e-4)


@pytest.mark.parametrize(("container", "codec"), CODED)
@pytest.mark.parametrize(("rate", "channels"), [(48_000, 2), (16_000, 1)])
def test_coded_files_hold_the_tone(container: str, codec: str, rate: int, channels: int) -> None:
    pytest.importorskip("av")
    samples = tone(440, SECONDS, rate)
    file = encoded(np.repeat(samples[:, None], channels, axis=1), rate, container, codec)
    found = decode(file, 16_000)
    assert abs(len(found) / 16_000 - SECONDS) < 0.12  # lossy codecs pad to whole frames
    spectrum = np.abs(np.fft.rfft(found * np.hanning(len(found))))
    assert abs(np.argmax(spectrum) * 16_000 / len(found) - 440) < 2
    assert np.abs(found[4000:12_000]).max() == pytest.approx(0.5, abs=CODED[container, codec])


@pytest.mark.parametrize("size", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_wav_of_a_pipe_without_a_size_is_read_to_its_end(size: int) -> None:
    # kkroening/ffmpeg-python#118: ffmpeg writes 0xFFFFFFFF when its output is a pipe; pollinations#11457: 0x7FFFFFFF
    file = bytearray(wav(tone(300, 0.1, 16_000), 16_000))
    at = file.index(b"data") + 4
    file[at : at + 4] = struct.pack("<I", size)
    assert len(decode(bytes(file), 16_000)) == 1600


def test_a_wav_that_ends_early_gives_what_is_there() -> None:
    file = wav(tone(300, 1.0, 16_000), 16_000)
    assert len(decode(file[: len(file) // 2 + 1], 16_000)) in range(7_950, 8_001)


@pytest.mark.parametrize("kept", [12, 20, 30, 36, 40])
def test_a_cut_header_is_refused(kept: int) -> None:
    with pytest.raises(InvalidArgument, match=r"Failed to load audio: .*send the complete file"):
        decode(wav(noise(100), 16_000)[:kept], 16_000)


@pytest.mark.parametrize(
    "file", [b"", bytes(4096), b"GIF89a" + bytes(64), b"#EXTM3U\nhttp://127.0.0.1/a.ts\n", b"RIFF"]
)
def test_other_files_are_refused(file: bytes) -> None:
    with pytest.raises(InvalidArgument, match="none of wav, mp3, flac, ogg, m4a, webm, aac; convert it"):
        decode(file, 16_000)


def test_a_wav_without_samples_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="it holds no samples"):
        decode(wav(np.zeros(0, np.float32), 16_000), 16_000)


@pytest.mark.parametrize(
    ("rate", "channels", "text"),
    [
        (0, 1, "sampling rate is 0 Hz"),
        (4_000_000_000, 1, "is 4000000000 Hz"),
        (16_000, 0, "0 channels"),
        (16_000, 60_000, "60000"),
    ],
)
def test_a_lying_header_is_refused_before_its_samples_are_read(rate: int, channels: int, text: str) -> None:
    file = bytearray(wav(noise(1000), 16_000))
    file[22:24], file[24:28] = struct.pack("<H", channels), struct.pack("<I", rate)
    with pytest.raises(InvalidArgument, match=text):
        decode(bytes(file), 16_000)


def test_a_file_that_lasts_too_long_is_refused_by_its_header() -> None:
    with pytest.raises(InvalidArgument, match=r"lasts longer than 1 s, the most that is accepted\. Send a shorter"):
        decode(wav(noise(16_001), 16_000), 16_000, AudioBounds(seconds=1))


@pytest.mark.parametrize(
    ("container", "codec"), [("mp3", "libmp3lame"), ("ogg", "libopus"), ("flac", "flac"), ("webm", "libopus")]
)
def test_a_coded_file_that_lasts_too_long_is_refused(container: str, codec: str) -> None:
    pytest.importorskip("av")
    with pytest.raises(InvalidArgument, match="lasts longer than 1 s"):
        decode(encoded(noise(48_000 * 2), 48_000, container, codec), 16_000, AudioBounds(seconds=1))


@pytest.mark.parametrize(("container", "codec"), CODED)
def test_a_coded_file_cut_anywhere_is_read_or_refused_in_our_words(container: str, codec: str) -> None:
    pytest.importorskip("av")
    file = encoded(noise(48_000), 48_000, container, codec)
    for kept in (16, 40, 100, len(file) // 3, len(file) - 7):
        text = _refusal(file[:kept])
        assert text.startswith("Failed to load audio: ") or not text
        assert "0x" not in text


def test_random_bytes_behind_a_format_mark_do_no_harm() -> None:
    pytest.importorskip("av")
    generator = np.random.default_rng(5)
    for start in (
        b"fLaC",
        b"OggS",
        b"\x1aE\xdf\xa3",
        b"ID3\x04",
        b"\xff\xfb\x90",
        b"\xff\xf1\x50",
        b"\0\0\0\x20ftypM4A ",
    ):
        for _ in range(20):
            file = start + generator.bytes(int(generator.integers(1, 3000)))
            text = _refusal(file)
            assert text.startswith("Failed to load audio: ") or not text


def test_ultrasound_becomes_silence() -> None:
    assert np.abs(decode(wav(tone(30_000, 0.5, 96_000), 96_000), 16_000)[400:7000]).max() < 1e-4


def test_a_jpeg_is_no_mp3() -> None:
    assert demuxer(b"\xff\xd8\xff\xe0") is None
    assert demuxer(b"\xff\xfb\x90") == "mp3"
    assert demuxer(b"\xff\xf1\x50") == "aac"


def test_without_pyav_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidArgument, match="pip install av"):
        decode(b"fLaC" + bytes(100), 16_000)


def test_stereo_at_another_rate_keeps_its_length() -> None:
    """Blaizzy/mlx-vlm#2258: channels were resampled in the place of samples; sound lasted three times as long."""
    both = np.repeat(tone(440, 1.0, 48_000)[:, None], 2, axis=1)
    np.testing.assert_allclose(
        decode(wav(both, 48_000), 16_000)[400:15_000], tone(440, 1.0, 16_000)[400:15_000], atol=2e-4
    )


def test_the_cost_of_resampling_grows_with_the_length() -> None:
    """sgl-project/sglang#20054: two hours took 40 minutes, since the cost grew faster than the length."""
    short, long = (noise(seconds * 44_100) for seconds in (2, 40))
    times = []
    for samples in (short, long):
        file, begun = wav(samples, 44_100), time.process_time()
        assert len(decode(file, 16_000)) == len(samples) * 160 // 441
        times.append(time.process_time() - begun)
    assert times[1] < 60 * times[0] + 1.0
