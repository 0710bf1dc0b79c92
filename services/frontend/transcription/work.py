"""Values that the steps of one transcription share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.shared.transcription.silence import SILENT_LEVEL, Piece
from quire.shared.transcription.transcript import Segment

if TYPE_CHECKING:
    from quire.services.frontend.calls.calls import Call
    from quire.services.frontend.request.call_headers import CallHeaders
    from quire.services.frontend.transcription.form import TranscriptionForm
    from quire.shared.media.audio.waveform import F32

TRANSCRIBE, TRANSLATE, ENGLISH = "transcribe", "translate", "en"


@dataclass(frozen=True, slots=True)
class TranscriptionWork:
    """One transcription: what the client asked for, and the sound."""

    form: TranscriptionForm
    task: str
    sent: CallHeaders
    call: Call
    samples: F32
    rate: int
    language: str = ""  # ISO 639 code of the speech; empty: not known, or a model that knows only English
    level: float = SILENT_LEVEL  # above which sound may be speech

    @property
    def written_language(self) -> str:
        """Language of the text."""
        return ENGLISH if self.task == TRANSLATE else self.language

    def sound(self, piece: Piece) -> F32:
        """Returns the samples of a piece."""
        return self.samples[piece.start : piece.end]

    def seconds(self, piece: Piece) -> float:
        """Returns the length of a piece."""
        return (piece.end - piece.start) / self.rate


class PieceRequest(NamedTuple):
    """Piece to decode."""

    piece: Piece
    has_times: bool  # whether the model writes time stamps
    context: tuple[int, ...] = ()  # tokens of the text before it


class SpokenPiece(NamedTuple):
    """Text of one piece, of one attempt."""

    segments: list[Segment]
    text: str
    avg_logprob: float
    is_accepted: bool
    temperature: float = 0.0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the text, without time stamps."""
        return tuple(token for segment in self.segments for token in segment.token_ids)


NOTHING_SPOKEN = SpokenPiece([], "", 0.0, is_accepted=True)
