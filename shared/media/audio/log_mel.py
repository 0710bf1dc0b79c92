"""Log-mel features of Whisper (arXiv 2212.04356) and of the models that share its feature extractor, equal to those of
transformers' WhisperFeatureExtractor within 2e-4."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire.shared.media.audio.waveform import F32

FLOOR = 1e-10  # of the power, before its logarithm
RANGE = 8.0  # decades below the loudest value that are kept
MOST_HZ = 8000.0
LINEAR_HZ, LINEAR_MELS, LOG_STEP = 1000.0, 15.0, 27.0 / math.log(6.4)  # Slaney's scale is linear up to 1000 Hz
HTK_MELS, HTK_HZ = 2595.0, 700.0  # HTK's scale is 2595 log10(1 + Hz / 700)
FRAMES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class MelSettings:
    """Settings of a feature extractor, in the names of preprocessor_config.json where these say what they are."""

    bins: int = 80
    rate: int = 16_000  # samples a second
    n_fft: int = 400
    hop_length: int = 160
    chunk_seconds: int = 30  # sound of one call of the encoder
    window: int = 0  # samples of the window, in the middle of n_fft; 0: n_fft
    is_htk: bool = False  # filters on the scale of HTK, of equal height; else on Slaney's, of equal area
    has_last_frame: bool = False  # that of the end of the sound, which Whisper leaves out

    @property
    def chunk_samples(self) -> int:
        return self.chunk_seconds * self.rate

    @property
    def chunk_frames(self) -> int:
        return self.chunk_samples // self.hop_length


def read_mel_settings(values: Mapping[str, Any], name: str) -> MelSettings:
    """Returns the settings in the file `name`; missing ones are those of Whisper. Raises InvalidArgument for settings
    that change the features in ways that are not supported."""
    for key in ("do_normalize", "dither"):
        if values.get(key):
            raise InvalidArgument(f"{name}: {key} is {values[key]!r}, which is not supported; remove it", field="model")
    return MelSettings(
        bins=_number(values, "feature_size", 80, name),
        rate=_number(values, "sampling_rate", 16_000, name),
        n_fft=_number(values, "n_fft", 400, name),
        hop_length=_number(values, "hop_length", 160, name),
        chunk_seconds=_number(values, "chunk_length", 30, name),
    )


def _number(values: Mapping[str, Any], key: str, default: int, name: str) -> int:
    """Returns a positive whole number. Raises InvalidArgument for anything else."""
    value = values.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
        raise InvalidArgument(f"{name}: {key} is {value!r}; a positive whole number is needed", field="model")
    return value


def log_mel(samples: F32, settings: MelSettings, num_samples: int | None = None) -> F32:
    """Returns the features of sound at the settings' rate, [bins, num_samples // hop_length], or one frame more with
    the last one. `num_samples`: length to
    which the sound is padded with zeros or cut; None: its own. Frames of zeros alone are not computed one by one."""
    total = len(samples) if num_samples is None else num_samples
    sound, half = samples[:total], settings.n_fft // 2
    num_frames = total // settings.hop_length + settings.has_last_frame
    # A frame with index i covers the samples from i * hop_length - half to i * hop_length + half.
    reaches_end = len(sound) + half >= total
    live = num_frames if reaches_end else min(num_frames, -(-(len(sound) + half) // settings.hop_length))
    padded = np.pad(sound, (0, total - len(sound)))
    edges = np.pad(padded, half, mode="reflect") if total > half else np.pad(padded, half)
    features = np.full((settings.bins, num_frames), np.log10(FLOOR), np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(edges, settings.n_fft)[:: settings.hop_length]
    window = _hann(settings.n_fft, settings.window or settings.n_fft)
    filters = mel_filters(settings.bins, settings.n_fft, settings.rate, is_htk=settings.is_htk)
    for start in range(0, live, FRAMES_AT_ONCE):
        end = min(start + FRAMES_AT_ONCE, live)
        spectrum = np.fft.rfft(frames[start:end] * window, axis=1)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
        features[:, start:end] = np.log10(np.maximum(filters @ power.T, FLOOR))
    return _scaled(features)


def _scaled(features: F32) -> F32:
    """Returns logarithms limited to RANGE below the largest, and scaled to about -1 to 1."""
    if not features.size:
        return features
    scaled: F32 = (np.maximum(features, features.max() - np.float32(RANGE)) + np.float32(4)) / np.float32(4)
    return scaled


@lru_cache(maxsize=8)
def _hann(n_fft: int, length: int) -> F32:
    """Returns the periodic Hann window of `length` samples with zeros around it, [n_fft]."""
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)).astype(np.float32)
    before = (n_fft - length) // 2
    return np.pad(window, (before, n_fft - length - before))


@lru_cache(maxsize=8)
def mel_filters(bins: int, n_fft: int, rate: int, *, is_htk: bool = False) -> F32:
    """Returns the triangular filters on Slaney's mel scale, of equal area, or on HTK's, of equal height, [bins,
    n_fft // 2 + 1]."""
    frequencies = np.linspace(0, rate / 2, n_fft // 2 + 1)
    if is_htk:
        corners = HTK_HZ * (10 ** (np.linspace(0, _htk_mels(rate / 2), bins + 2) / HTK_MELS) - 1)
    else:
        corners = _hertz(np.linspace(0, _mels(MOST_HZ), bins + 2))
    widths = np.diff(corners)
    rising = (frequencies[None] - corners[:-2, None]) / widths[:-1, None]
    falling = (corners[2:, None] - frequencies[None]) / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    if is_htk:
        return np.ascontiguousarray(triangles, dtype=np.float32)
    return np.ascontiguousarray(triangles * (2 / (corners[2:] - corners[:-2]))[:, None], dtype=np.float32)


def _htk_mels(hertz: float) -> float:
    """Returns a frequency on HTK's scale."""
    return HTK_MELS * math.log10(1 + hertz / HTK_HZ)


def _mels(hertz: float) -> float:
    """Returns a frequency on Slaney's scale."""
    if hertz < LINEAR_HZ:
        return hertz * LINEAR_MELS / LINEAR_HZ
    return LINEAR_MELS + math.log(hertz / LINEAR_HZ) * LOG_STEP


def _hertz(mels: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the frequencies of values on Slaney's scale."""
    linear = mels * LINEAR_HZ / LINEAR_MELS
    return np.where(mels < LINEAR_MELS, linear, LINEAR_HZ * np.exp((mels - LINEAR_MELS) / LOG_STEP))
