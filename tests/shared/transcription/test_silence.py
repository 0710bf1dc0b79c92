"""Long sound is cut in pauses, and every sample is in one piece."""

from __future__ import annotations

import numpy as np
import pytest

from quire.shared.transcription.silence import (
    Piece,
    cut_at_silence,
    is_silent,
    loud_seconds,
    speech_level,
    spoken_pieces,
)
from tests.shared.media.audio.files import noise, tone

RATE = 16_000


def speech(*spans: tuple[float, float], seconds: float, floor: float = 1e-4) -> np.ndarray:
    """Returns noise at the level of speech in `spans` of seconds, over a quiet background."""
    sound = noise(int(seconds * RATE), level=floor)
    for start, end in spans:
        at = slice(int(start * RATE), int(end * RATE))
        sound[at] += noise(at.stop - at.start, seed=int(start * 10))
    return sound


def check_covers(pieces: list[Piece], num_samples: int, most: int) -> None:
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == num_samples
    assert all(0 < piece.end - piece.start <= most for piece in pieces)


def test_a_cut_lies_in_the_pause() -> None:
    pieces = cut_at_silence(speech((0, 26.2), (26.9, 29.5), (29.6, 50), seconds=50), RATE)
    check_covers(pieces, 50 * RATE, 30 * RATE)
    assert 26.3 < pieces[0].end / RATE < 26.8


def test_of_two_pauses_the_longer_one_is_taken() -> None:
    pieces = cut_at_silence(speech((0, 26.0), (26.4, 28.0), (29.2, 45), seconds=45), RATE)
    assert 28.1 < pieces[0].end / RATE < 29.1


@pytest.mark.parametrize("seconds", [0.01, 29.99, 30.0, 30.01, 95.3])
def test_any_length_is_covered_once(seconds: float) -> None:
    for sound in (speech((0, seconds), seconds=seconds), np.zeros(int(seconds * RATE), np.float32)):
        check_covers(cut_at_silence(sound, RATE), len(sound), 30 * RATE)


def test_nothing_has_no_pieces() -> None:
    assert cut_at_silence(np.zeros(0, np.float32), RATE) == []


def test_random_sounds_are_covered_once() -> None:
    generator = np.random.default_rng(3)
    for _ in range(30):
        rate = int(generator.choice([8_000, 16_000]))
        sound = (generator.standard_normal(int(generator.integers(1, 12 * rate))) * generator.random()).astype(
            np.float32
        )
        most_s, search_s = 2.0, float(generator.choice([0.05, 0.5, 1.9]))
        check_covers(cut_at_silence(sound, rate, most_s, search_s), len(sound), int(most_s * rate))


def test_pieces_begin_and_end_with_the_speech() -> None:
    """A piece that begins with 20 s of silence has times from its own start, which would be wrong by as much."""
    sound = speech((0.5, 8), (47.9, 51.9), (91.9, 94.9), seconds=110)
    pieces = spoken_pieces(sound, RATE)
    starts, ends = [piece.start / RATE for piece in pieces], [piece.end / RATE for piece in pieces]
    np.testing.assert_allclose(starts, [0.3, 47.7, 91.7], atol=0.05)
    np.testing.assert_allclose(ends, [8.2, 52.1, 95.1], atol=0.05)
    assert spoken_pieces(np.zeros(40 * RATE, np.float32), RATE) == []
    assert spoken_pieces(speech((0, 0.1), seconds=0.1), RATE) == [Piece(0, 1600)]


def test_trimmed_pieces_keep_all_loud_samples() -> None:
    generator = np.random.default_rng(4)
    for _ in range(40):
        sound = np.zeros(int(generator.integers(4_000, 60_000)), np.float32)
        begin, end = sorted(generator.integers(0, len(sound), 2).tolist())
        sound[begin:end] = 0.3
        pieces = spoken_pieces(sound, RATE, 2.0, 0.5)
        kept = np.zeros(len(sound), bool)
        for piece in pieces:
            kept[piece.start : piece.end] = True
        if end - begin > RATE // 5:
            assert kept[begin + RATE // 50 : end - RATE // 50].all()


def test_silence_and_speech_are_told_apart() -> None:
    assert is_silent(np.zeros(RATE, np.float32), RATE)
    assert is_silent(noise(RATE, level=3e-4), RATE)
    assert is_silent(np.zeros(5, np.float32), RATE)
    assert not is_silent(speech((3.0, 3.4), seconds=30), RATE)
    assert not is_silent(tone(300, 0.05, RATE), RATE)


def test_speech_stands_out_of_a_steady_background() -> None:
    """A fan or a bad line between two sentences is no speech, and its level does not move the times."""
    sound = speech((2, 8), (47.9, 51.9), seconds=60, floor=0.008)
    pieces = spoken_pieces(sound, RATE)
    np.testing.assert_allclose([piece.start / RATE for piece in pieces], [1.8, 47.7], atol=0.1)
    np.testing.assert_allclose([piece.end / RATE for piece in pieces], [8.2, 52.1], atol=0.1)
    assert speech_level(sound, RATE) > 0.008
    assert speech_level(speech((2, 8), seconds=60), RATE) == pytest.approx(1e-3)


def test_a_background_that_is_as_loud_as_speech_is_kept() -> None:
    sound = noise(20 * RATE)
    assert spoken_pieces(sound, RATE) == [Piece(0, len(sound))]


def test_a_long_pause_separates_pieces_and_a_short_one_does_not() -> None:
    assert len(spoken_pieces(speech((1, 5), (7.5, 10), seconds=12), RATE)) == 1
    assert len(spoken_pieces(speech((1, 5), (8.5, 12), seconds=14), RATE)) == 2


def test_a_cut_in_the_middle_of_speech_is_marked() -> None:
    """vllm#58029: what such a cut divides must not be lost."""
    endless, with_pause = speech((0, 50), seconds=50), speech((0, 26.2), (26.9, 50), seconds=50)
    assert [piece.is_cut for piece in spoken_pieces(endless, RATE)] == [True, False]
    assert [piece.is_cut for piece in spoken_pieces(with_pause, RATE)] == [False, False]


def test_loud_seconds_are_counted() -> None:
    assert loud_seconds(speech((1, 3), (4, 4.5), seconds=10), RATE) == pytest.approx(2.5, abs=0.05)
    assert loud_seconds(np.zeros(0, np.float32), RATE) == 0
