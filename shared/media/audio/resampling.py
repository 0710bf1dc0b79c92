"""Change of the sampling rate by a polyphase filter: a sinc with a Kaiser window.

Tones up to 0.9 of the lower Nyquist frequency keep their level within 0.01 dB; those that the new rate cannot represent
are at least 90 dB down.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire.shared.media.audio.waveform import F32

ZERO_CROSSINGS = 48  # of the sinc, on each side
ROLLOFF = 0.95  # middle of the transition, as a part of the lower Nyquist frequency
BETA = 10.0  # of the Kaiser window: side lobes 100 dB down
MOST_DOWN = 4096  # of a ratio up / down: unusual ones are rounded to one whose filters are few, by 10^-7 of the rate
BLOCK = 8192  # outputs of one phase that are computed at once: bounds the copy of their inputs


def resampled(samples: F32, rate: int, target: int) -> F32:
    """Returns samples taken `rate` times a second at `target` samples a second; the samples themselves if the rates are
    equal."""
    if rate == target or not len(samples):
        return samples
    up, down = Fraction(target, rate).limit_denominator(MOST_DOWN).as_integer_ratio()
    num_outputs = ceil(len(samples) * up / down)
    half = _half_width(up, down)
    width = 2 * half
    padded = np.pad(samples.astype(np.float32, copy=False), (half, width + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    result = np.empty(num_outputs, np.float32)
    for phase in range(min(up, num_outputs)):
        # Output phase + k * up lies at the input position (phase * down) / up + k * down.
        first, remainder = divmod(phase * down, up)
        taps = _taps(up, down, remainder)
        count = len(range(phase, num_outputs, up))
        rows = windows[first + 1 :: down][:count]
        for start in range(0, count, BLOCK):
            block = rows[start : start + BLOCK]
            at = phase + start * up
            result[at : at + len(block) * up : up] = np.ascontiguousarray(block) @ taps
    return result


def _half_width(up: int, down: int) -> int:
    """Returns the number of input samples on each side of an output that contribute to it."""
    return ceil(ZERO_CROSSINGS * max(1.0, down / up) / ROLLOFF)


@lru_cache(maxsize=2048)
def _taps(up: int, down: int, remainder: int) -> F32:
    """Returns the filter for outputs `remainder` / `up` after an input sample, for the inputs from half - 1 before it
    to half after it."""
    half = _half_width(up, down)
    cutoff = ROLLOFF * min(1.0, up / down)
    distance = np.arange(-half + 1, half + 1) - remainder / up
    window = np.i0(BETA * np.sqrt(np.clip(1 - (distance / half) ** 2, 0, None))) / np.i0(BETA)
    taps = cutoff * np.sinc(cutoff * distance) * window
    normalized: F32 = (taps / taps.sum()).astype(np.float32)
    return normalized
