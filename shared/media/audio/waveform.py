"""Decoded sound, and the limits of decoding it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt

    F32 = npt.NDArray[np.float32]

FIELD = "messages"


@dataclass(frozen=True, slots=True)
class AudioBounds:
    """Limits of one sound file. What its header says is checked before anything is decoded, and what comes out while it
    is decoded, because headers lie."""

    seconds: float = 600.0
    channels: int = 16
    least_rate: int = 1_000  # samples a second
    most_rate: int = 384_000


@dataclass(frozen=True, slots=True)
class Waveform:
    """Sound of one channel."""

    samples: F32 = field(repr=False)  # [num_samples], nominally from -1 to 1
    rate: int  # samples a second

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def refused(reason: str) -> InvalidArgument:
    """Returns the error for a file that cannot be decoded."""
    return InvalidArgument(f"Failed to load audio: {reason}", field=FIELD)


def check_format(rate: int, channels: int, bounds: AudioBounds) -> None:
    """Raises InvalidArgument for a number of channels or a sampling rate beyond the bounds."""
    if not 1 <= channels <= bounds.channels:
        raise refused(f"it has {channels} channels; 1 to {bounds.channels} are accepted. Mix it down to one.")
    if not bounds.least_rate <= rate <= bounds.most_rate:
        raise refused(
            f"its sampling rate is {rate} Hz; {bounds.least_rate} to {bounds.most_rate} Hz are accepted. Resample it."
        )


def check_length(num_samples: int, rate: int, bounds: AudioBounds) -> None:
    """Raises InvalidArgument for more samples than the bounds allow."""
    if num_samples > bounds.seconds * rate:
        raise refused(
            f"it lasts longer than {bounds.seconds:g} s, the most that is accepted. Send a shorter file, or cut it "
            "into several."
        )


def mono(samples: F32) -> F32:
    """Returns the mean of the channels, [num_samples, channels] -> [num_samples]; NaN becomes silence and infinite
    values the largest sample."""
    mixed = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)
    return np.ascontiguousarray(np.nan_to_num(mixed, nan=0.0, posinf=1.0, neginf=-1.0), dtype=np.float32)


def require_samples(wave: Waveform) -> Waveform:
    """Returns the wave itself. Raises InvalidArgument if it has no samples."""
    if not len(wave.samples):
        raise refused("it holds no samples; record or export it again")
    return wave
