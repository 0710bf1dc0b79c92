"""Text of sound that is still arriving: the window of the last seconds is read again and again, and only words on which
two readings agree are given out (local agreement, arXiv 2307.14743)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.shared.transcription.joining import WITHOUT_SPACES
from quire.shared.transcription.silence import is_silent, quietest, speech_level
from quire.shared.transcription.transcript import Transcript

if TYPE_CHECKING:
    from quire.shared.media.audio.waveform import F32

SAMPLE_BYTES = 2
NEWS_S = 0.4  # of new sound, after which the window is read again
MOST_UNREAD_S = 60.0  # of sound that is kept; a sender beyond it waits
LISTENED_S = 10.0  # of the last sound, by which the level of silence is found
SEARCH_PART = 6  # a window that is full is cut in its last sixth
PUNCTUATION = ".,;:!?…-\"'。、！？"

Read = Callable[[bytes, bool], Awaitable[Transcript | None]]
"""Function from a window of PCM16, and whether its text is final, to its transcript; None: not now."""


class LiveUtterance:
    """Sound that arrives, from its first sample to its end, and the words that are read from it."""

    def __init__(self, read: Read, rate: int, longest_s: float) -> None:
        """Starts without sound. `rate`: samples a second; `longest_s`: length of the longest window that is read."""
        self._read, self._rate = read, rate
        self._longest = int(longest_s * rate)
        self._sound = bytearray()  # behind the windows whose text is final
        self._num_read = 0  # bytes of the last reading
        self._is_ended = False
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._words = StableWords("")
        self.num_bytes = 0  # in all
        self.text = ""  # given out so far

    @property
    def seconds(self) -> float:
        """Length of the sound so far."""
        return self.num_bytes / (SAMPLE_BYTES * self._rate)

    async def append(self, sound: bytes) -> None:
        """Adds samples; waits while more than MOST_UNREAD_S are to be read."""
        while len(self._sound) > MOST_UNREAD_S * self._rate * SAMPLE_BYTES:
            self._room.clear()
            await self._room.wait()
        self._sound += sound
        self.num_bytes += len(sound)
        self._news.set()

    def has_fallen_silent(self, silence_s: float) -> bool:
        """Returns whether there was speech in the last LISTENED_S, and none in the last `silence_s`."""
        window = samples_of(self._sound[-int(LISTENED_S * self._rate) * SAMPLE_BYTES :])
        tail = window[-int(silence_s * self._rate) :]
        if len(tail) < int(silence_s * self._rate):
            return False
        level = speech_level(window, self._rate)
        return is_silent(tail, self._rate, level) and not is_silent(window, self._rate, level)

    def end(self) -> None:
        """Notes that no more sound follows."""
        self._is_ended = True
        self._news.set()

    async def deltas(self) -> AsyncIterator[str]:
        """Yields new text until the utterance has ended and all of it is read; joined it is `text`."""
        while True:
            await self._until_news()
            is_full = len(self._sound) > self._longest * SAMPLE_BYTES
            is_last = self._is_ended and not is_full
            end = self._cut() if is_full else len(self._sound)
            if delta := await self._delta(bytes(self._sound[:end]), is_final=is_full or is_last):
                self.text += delta
                yield delta
            if is_full:
                del self._sound[:end]
                self._num_read, self._words = 0, StableWords(self._words.language)
                self._room.set()
            if is_last:
                return

    async def _until_news(self) -> None:
        """Waits until there is enough new sound to read, or the end."""
        enough = self._num_read + int(NEWS_S * self._rate) * SAMPLE_BYTES
        while not self._is_ended and len(self._sound) < enough:
            self._news.clear()
            await self._news.wait()

    def _cut(self) -> int:
        """Returns the bytes before the longest pause in the last part of a full window."""
        search = self._longest // SEARCH_PART
        begin = self._longest - search
        part = samples_of(self._sound[begin * SAMPLE_BYTES : self._longest * SAMPLE_BYTES])
        return (begin + max(1, quietest(part, self._rate))) * SAMPLE_BYTES

    async def _delta(self, window: bytes, *, is_final: bool) -> str:
        """Returns the words of a window that are given out now: the stable ones, or all that are left."""
        self._num_read = len(window)
        transcript = await self._read(window, is_final) if window else None
        if transcript is None:
            return ""
        if transcript.language and not self._words.language:
            self._words.language = transcript.language
        words = self._words.all(transcript.text) if is_final else self._words.stable(transcript.text)
        separator = "" if self._words.language in WITHOUT_SPACES else " "
        text = separator.join(words)
        return f"{separator}{text}" if text and self.text else text


class StableWords:
    """Words of one window, of which those are given out on which two readings agree. Words that were given out stay,
    whatever later readings say."""

    def __init__(self, language: str) -> None:
        """`language`: ISO 639 code; empty: not known."""
        self.language = language
        self._num_given = 0
        self._before: Sequence[str] = ()

    def stable(self, text: str) -> Sequence[str]:
        """Returns the next words on which this reading agrees with the one before."""
        words = self._split(text)
        agreed = 0
        for old, new in zip(self._before, words, strict=False):
            if _bare(old) != _bare(new):
                break
            agreed += 1
        self._before = words
        return self._next(words, agreed)

    def all(self, text: str) -> Sequence[str]:
        """Returns the next words of the last reading."""
        words = self._split(text)
        return self._next(words, len(words))

    def _next(self, words: Sequence[str], end: int) -> Sequence[str]:
        found = words[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return found

    def _split(self, text: str) -> Sequence[str]:
        return [*text.strip()] if self.language in WITHOUT_SPACES else text.split()


def _bare(word: str) -> str:
    """Returns a word without case and punctuation, which change with every reading of its end."""
    return word.strip(PUNCTUATION).casefold() or word


def samples_of(sound: bytes | bytearray) -> F32:
    """Returns PCM16 as samples from -1 to 1."""
    samples: F32 = np.frombuffer(sound, "<i2").astype(np.float32) / np.float32(1 << 15)
    return samples
