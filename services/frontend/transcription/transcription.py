"""Transcription as the edges use it."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.services.frontend.transcription.sound_memory import SoundMemory
from quire.services.frontend.transcription.transcriber import Transcriber


@dataclass(frozen=True, slots=True)
class Transcription:
    """The transcriber of a frontend whose model transcribes, and the memory that all edges share for it."""

    transcriber: Transcriber
    memory: SoundMemory = field(default_factory=SoundMemory)
