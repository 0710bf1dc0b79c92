"""Finds speech in long sound by its energy, and cuts it at silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from quire.shared.media.audio.waveform import F32

    F64 = npt.NDArray[np.float64]

# Energies are averaged over 0.2 s: shorter than a pause, longer than a stop consonant.
FRAME_S, WINDOW_FRAMES = 0.01, 20
MARGIN_S = 0.2  # of silence that is kept around speech
PAUSE_S = 3.0  # a longer pause separates pieces: times after it would be those of the model's guess
SILENT_LEVEL = 1e-3  # root mean square of sound without speech: 60 dB below full scale
QUIET_FACTOR = 1.6  # of the least energy: frames up to it belong to the same pause, 2 dB
BACKGROUND_SHARE = 0.25  # of the windows that have nearly the least level, if there is a steady background
BACKGROUND_FACTOR = 2.5  # of the background's level, which speech exceeds: 8 dB
SPEECH_FACTOR = 0.25  # of the loudest window's level: a background that is louder is not told from speech
CUT_POWER = 0.1  # of a piece's mean power: a cut where it is higher is in the middle of speech


class Piece(NamedTuple):
    """Range of samples, half open."""

    start: int
    end: int
    is_cut: bool = False  # its end is in the middle of speech


def speech_level(samples: F32, rate: int) -> float:
    """Returns the level (root mean square over 0.2 s) above which sound may be speech: that of silence, or one above a
    steady background, such as the noise of a fan."""
    levels = np.sqrt(_window_powers(samples, rate))
    if not len(levels):
        return SILENT_LEVEL
    least, most = float(np.percentile(levels, 5)), float(levels.max())
    is_steady = float(np.mean(levels <= least * QUIET_FACTOR**0.5)) >= BACKGROUND_SHARE
    return max(SILENT_LEVEL, min(BACKGROUND_FACTOR * least, SPEECH_FACTOR * most)) if is_steady else SILENT_LEVEL


def cut_at_silence(samples: F32, rate: int, most_s: float = 30.0, search_s: float = 5.0) -> list[Piece]:
    """Cuts sound into pieces of at most `most_s` seconds, each in the middle of the longest pause among the last
    `search_s` seconds that it may have. The pieces cover all samples once, in order."""
    pieces: list[Piece] = []
    start = 0
    while start < len(samples):
        piece = first_piece(samples[start:], rate, most_s, search_s)
        pieces.append(Piece(start, start + piece.end, piece.is_cut))
        start += piece.end
    return pieces


def first_piece(samples: F32, rate: int, most_s: float = 30.0, search_s: float = 5.0) -> Piece:
    """Returns the first piece of sound that is not empty (see cut_at_silence())."""
    most, search = int(most_s * rate), int(search_s * rate)
    if len(samples) <= most:
        return Piece(0, len(samples))
    begin = most - search
    end = begin + quietest(samples[begin:most], rate)
    around = samples[max(0, end - int(0.1 * rate)) : end + int(0.1 * rate)]
    power, mean = (float(np.mean(np.square(part, dtype=np.float64))) for part in (around, samples[:end]))
    return Piece(0, end, power > max(SILENT_LEVEL**2, CUT_POWER * mean))


def quietest(samples: F32, rate: int) -> int:
    """Returns the sample in the middle of the longest pause; at the end of sound that is shorter than a window."""
    frame, means = _frame(rate), _window_powers(samples, rate)
    if not len(means):
        return len(samples)
    quiet = means <= means.min() * QUIET_FACTOR + 1e-12
    starts, ends = _runs(quiet)
    longest = len(ends) - 1 - int(np.argmax((ends - starts)[::-1]))  # the last one of equals
    return int((starts[longest] + ends[longest] - 1 + WINDOW_FRAMES) * frame // 2)


def spoken_pieces(samples: F32, rate: int, most_s: float = 30.0, search_s: float = 5.0) -> list[Piece]:
    """Returns the pieces of sound that may be speech, without the silence between them, in order: each begins and ends
    about where the speech does, and has no pause of more than PAUSE_S."""
    level = speech_level(samples, rate)
    found: list[Piece] = []
    for region in _regions(samples, rate, level):
        for piece in cut_at_silence(samples[region.start : region.end], rate, most_s, search_s):
            moved = Piece(region.start + piece.start, region.start + piece.end, piece.is_cut)
            found += _trimmed(moved, samples[moved.start : moved.end], rate, level)
    return found


def is_silent(samples: F32, rate: int, level: float = SILENT_LEVEL) -> bool:
    """Returns whether no window of the sound is louder than `level`. Models invent a transcript for such sound."""
    means = _window_powers(samples, rate)
    if not len(means):
        return not len(samples) or float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) <= level
    return bool(np.sqrt(means.max()) <= level)


def loud_seconds(samples: F32, rate: int, level: float = SILENT_LEVEL) -> float:
    """Returns how much of the sound is louder than `level`, in seconds."""
    return float(np.count_nonzero(np.sqrt(_energies(samples, _frame(rate))) > level)) * FRAME_S


def speech_start(samples: F32, rate: int, level: float = SILENT_LEVEL) -> int:
    """Returns the sample at which the first sound above `level` begins, MARGIN_S before it; 0 if there is none."""
    return next((region.start for region in _regions(samples, rate, level)), 0)


def _regions(samples: F32, rate: int, level: float) -> Iterator[Piece]:
    """Yields the stretches of sound above `level`, with MARGIN_S around them, that no pause of PAUSE_S divides; sound
    that is shorter than a window as a whole, unless it is silent."""
    frame, margin = _frame(rate), int(MARGIN_S * rate)
    means = _window_powers(samples, rate)
    if not len(means):
        yield from () if is_silent(samples, rate, level) else (Piece(0, len(samples)),)
        return
    loud = np.flatnonzero(np.sqrt(means) > level)
    for part in np.split(loud, np.flatnonzero(np.diff(loud) > PAUSE_S / FRAME_S) + 1):
        if len(part):
            start = int(part[0] + WINDOW_FRAMES - 1) * frame - margin  # the last frame of the window is loud
            end = int(part[-1] + 1) * frame + margin
            start = max(0, start)
            yield Piece(start, min(len(samples), max(end, start + 1)))


def _trimmed(piece: Piece, sound: F32, rate: int, level: float) -> Iterator[Piece]:
    """Yields the piece without the silence before and after the speech in it; nothing if it is silent."""
    regions = list(_regions(sound, rate, level))
    if regions:
        yield Piece(piece.start + regions[0].start, piece.start + regions[-1].end, piece.is_cut)


def _runs(flags: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Returns where runs of true flags begin and end (exclusive)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return edges[::2], edges[1::2]


def _frame(rate: int) -> int:
    """Returns the samples of a frame."""
    return max(1, int(FRAME_S * rate))


def _window_powers(samples: F32, rate: int) -> F64:
    """Returns the mean square over each window, one per frame; none for sound that is shorter."""
    energies = _energies(samples, _frame(rate))
    if len(energies) < WINDOW_FRAMES:
        return energies[:0]
    return np.convolve(energies, np.full(WINDOW_FRAMES, 1 / WINDOW_FRAMES), mode="valid")


def _energies(samples: F32, frame: int) -> F64:
    """Returns the mean square of each whole frame."""
    whole = samples[: len(samples) // frame * frame].reshape(-1, frame)
    energies: F64 = np.mean(np.square(whole, dtype=np.float64), axis=1)
    return energies
