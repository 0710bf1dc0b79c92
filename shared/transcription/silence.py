"""Cutting of long sound at silence, by its energy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from quire.shared.media.audio.waveform import F32

    F64 = npt.NDArray[np.float64]

FRAME_S, WINDOW_FRAMES = (
    0.01,
    20,
)  # energies are averaged over 0.2 s: shorter than a pause, longer than a stop consonant
MARGIN_S = 0.2  # of silence that is kept around speech
SILENT_LEVEL = 1e-3  # root mean square of sound without speech: 60 dB below full scale
QUIET_FACTOR = 1.6  # of the least energy: frames up to it belong to the same pause, 2 dB


class Piece(NamedTuple):
    """Range of samples, half open."""

    start: int
    end: int


def cut_at_silence(samples: F32, rate: int, most_s: float = 30.0, search_s: float = 5.0) -> list[Piece]:
    """Cuts sound into pieces of at most `most_s` seconds, each in the middle of the longest pause among the last
    `search_s` seconds that it may have. The pieces cover all samples once, in order."""
    most, search = int(most_s * rate), int(search_s * rate)
    pieces: list[Piece] = []
    start = 0
    while len(samples) - start > most:
        begin = start + most - search
        end = begin + quietest(samples[begin : start + most], rate)
        pieces.append(Piece(start, end))
        start = end
    return [*pieces, Piece(start, len(samples))] if start < len(samples) else pieces


def quietest(samples: F32, rate: int) -> int:
    """Returns the sample in the middle of the longest pause; at the end of sound that is shorter than a window."""
    frame = max(1, int(FRAME_S * rate))
    energies = _energies(samples, frame)
    if len(energies) < WINDOW_FRAMES:
        return len(samples)
    means = np.convolve(energies, np.full(WINDOW_FRAMES, 1 / WINDOW_FRAMES), mode="valid")
    quiet = means <= means.min() * QUIET_FACTOR + 1e-12
    edges = np.flatnonzero(np.diff(np.concatenate(([0], quiet.astype(np.int8), [0]))))
    starts, ends = edges[::2], edges[1::2]
    longest = len(ends) - 1 - int(np.argmax((ends - starts)[::-1]))  # the last one of equals
    return int((starts[longest] + ends[longest] - 1 + WINDOW_FRAMES) * frame // 2)


def spoken_pieces(samples: F32, rate: int, most_s: float = 30.0, search_s: float = 5.0) -> list[Piece]:
    """Returns the pieces of cut_at_silence() that are not silent, each without the silence before and after the sound
    in it, so that its start is about that of the speech."""
    pieces = cut_at_silence(samples, rate, most_s, search_s)
    spoken = [(piece, samples[piece.start : piece.end]) for piece in pieces]
    return [_trimmed(piece, sound, rate) for piece, sound in spoken if not is_silent(sound, rate)]


def _trimmed(piece: Piece, sound: F32, rate: int) -> Piece:
    """Returns the piece from MARGIN_S before its first loud window to MARGIN_S after its last one."""
    frame, margin = max(1, int(FRAME_S * rate)), int(MARGIN_S * rate)
    energies = _energies(sound, frame)
    if len(energies) < WINDOW_FRAMES:
        return piece
    means = np.convolve(energies, np.full(WINDOW_FRAMES, 1 / WINDOW_FRAMES), mode="valid")
    loud = np.flatnonzero(np.sqrt(means) > SILENT_LEVEL)
    start = piece.start + int(loud[0] + WINDOW_FRAMES - 1) * frame - margin  # the last frame of the window is loud
    end = piece.start + int(loud[-1] + 1) * frame + margin
    return Piece(max(piece.start, start), min(piece.end, max(end, start + 1)))


def is_silent(samples: F32, rate: int) -> bool:
    """Returns whether no window of the sound is louder than SILENT_LEVEL. Models invent a transcript for such sound."""
    frame = max(1, int(FRAME_S * rate))
    energies = _energies(samples, frame)
    if len(energies) < WINDOW_FRAMES:
        return not len(samples) or float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) <= SILENT_LEVEL
    means = np.convolve(energies, np.full(WINDOW_FRAMES, 1 / WINDOW_FRAMES), mode="valid")
    return bool(np.sqrt(means.max()) <= SILENT_LEVEL)


def _energies(samples: F32, frame: int) -> F64:
    """Returns the mean square of each whole frame."""
    whole = samples[: len(samples) // frame * frame].reshape(-1, frame)
    energies: F64 = np.mean(np.square(whole, dtype=np.float64), axis=1)
    return energies
