"""Words of arriving sound are given out when two readings agree on them, once, and none is lost at the end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from quire.services.frontend.transcription.live import MOST_UNREAD_S, LiveUtterance, StableWords
from quire.shared.transcription.transcript import Transcript
from tests.waiting import loop_turns

RATE = 1000
TURNS = 10  # of the event loop, in which a scripted reading ends
SECOND = np.full(RATE, 8000, "<i2").tobytes()


class Reader:
    """Reads the scripted texts, one after the other; the last one again and again."""

    def __init__(self, *texts: str | None, language: str = "en") -> None:
        self._texts, self._language = list(texts), language
        self.windows: list[tuple[int, bool]] = []  # seconds, and whether its text is final

    async def __call__(self, sound: bytes, is_final: bool) -> Transcript | None:
        self.windows.append((len(sound) // (2 * RATE), is_final))
        text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
        return None if text is None else Transcript([], text, self._language, 0.0)


async def read_by_seconds(reader: Reader, seconds: int, longest_s: float = 30.0) -> tuple[list[str], LiveUtterance]:
    """Returns the deltas of sound that arrives second by second, each read before the next one."""
    utterance, deltas = LiveUtterance(reader, RATE, longest_s), []

    async def collect() -> None:
        deltas.extend([delta async for delta in utterance.deltas()])

    task = asyncio.create_task(collect())
    for _ in range(seconds):
        await utterance.append(SECOND)
        await loop_turns(TURNS)
    utterance.end()
    await task
    return deltas, utterance


@pytest.mark.asyncio
async def test_only_words_are_sent_on_which_two_readings_agree() -> None:
    reader = Reader("the", "The quick. Brow", "the quick brown fox", "the quick brown fox jumps")
    deltas, utterance = await read_by_seconds(reader, 3)
    assert deltas == ["The", " quick", " brown fox jumps"]
    assert utterance.text == "The quick brown fox jumps"
    assert utterance.seconds == 3.0


@pytest.mark.asyncio
async def test_words_that_were_sent_stay() -> None:
    deltas, _ = await read_by_seconds(Reader("I see", "I see", "Icy roads ahead"), 2)
    assert deltas == ["I see", " ahead"]


@pytest.mark.asyncio
async def test_languages_without_spaces_are_sent_by_character() -> None:
    deltas, utterance = await read_by_seconds(Reader("你好", "你好世", "你好世界", language="zh"), 2)
    assert (deltas[0], utterance.text) == ("你好", "你好世界")


@pytest.mark.asyncio
async def test_readings_that_are_left_out_lose_nothing() -> None:
    deltas, _ = await read_by_seconds(Reader(None, None, "all of it"), 2)
    assert deltas == ["all of it"]


@pytest.mark.asyncio
async def test_a_long_utterance_is_cut_and_joined() -> None:
    reader = Reader("one")
    deltas, utterance = await read_by_seconds(reader, 25, longest_s=10.0)
    finals = [seconds for seconds, is_final in reader.windows if is_final]
    assert len(finals) == 3
    assert sum(finals) in (23, 24, 25)
    assert max(seconds for seconds, _ in reader.windows) <= 10
    assert "".join(deltas) == utterance.text == "one one one"


@pytest.mark.asyncio
async def test_sound_without_text_and_no_sound() -> None:
    assert (await read_by_seconds(Reader(""), 3))[0] == []
    reader = Reader("never")
    assert (await read_by_seconds(reader, 0))[0] == []
    assert reader.windows == []


@pytest.mark.asyncio
async def test_a_sender_that_is_too_fast_waits() -> None:
    utterance = LiveUtterance(Reader("x"), RATE, 30.0)
    await utterance.append(SECOND * int(MOST_UNREAD_S + 1))
    waiting = asyncio.create_task(utterance.append(SECOND))
    await loop_turns()
    assert not waiting.done()
    deltas = utterance.deltas()
    await anext(deltas)  # one window is read and dropped
    await anext(deltas)
    await waiting
    assert utterance.seconds == MOST_UNREAD_S + 2
    await deltas.aclose()


def test_stable_words_ignore_case_and_punctuation() -> None:
    words = StableWords("en")
    assert words.stable("Well, this") == []
    assert words.stable("well this is") == ["well", "this"]
    assert words.all("Well, this is it.") == ["is", "it."]


@pytest.mark.parametrize(
    ("levels", "is_over"),
    [
        ((0.0, 0.0), False),  # nothing was said
        ((0.3, 0.3), False),  # still speaking
        ((0.3, 0.0), True),
        ((0.3, 0.01), True),  # a background
        ((0.0, 0.3), False),
        ((0.3,), False),
    ],
)
@pytest.mark.asyncio
async def test_a_speaker_falls_silent(levels: tuple[float, ...], is_over: bool) -> None:
    utterance = LiveUtterance(Reader(""), RATE, 30.0)
    rng = np.random.default_rng(3)
    for level in levels:
        sound = (level * 8000 * rng.standard_normal(RATE)).clip(-32768, 32767).astype("<i2")
        await utterance.append(sound.tobytes())
    assert utterance.has_fallen_silent(0.5) is is_over
