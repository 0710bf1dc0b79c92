"""Values of a transcript: its segments and the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Word:
    """Word with its times, in seconds from the start of the file, and the punctuation around it."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Stretch of speech with its times, in seconds from the start of the file."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    temperature: float = 0.0
    avg_logprob: float = 0.0
    no_speech_prob: float | None = None
    words: tuple[Word, ...] = field(default=(), repr=False)  # only if they were asked for


@dataclass(frozen=True, slots=True)
class Transcript:
    """Text of a whole file."""

    segments: Sequence[Segment]
    text: str
    language: str
    seconds: float  # of the file
    task: str = "transcribe"  # or "translate"

    @property
    def words(self) -> list[Word]:
        """Words of all segments."""
        return [word for segment in self.segments for word in segment.words]
