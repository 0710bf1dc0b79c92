"""Qwen3-ASR: log-mel features in chunks of one second, and up to 13 tokens for each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.shared.errors import InvalidArgument
from quire.shared.media.audio.log_mel import MelSettings, log_mel, read_mel_settings
from quire.shared.media.audio.mel_files import placeholder_of
from quire.shared.media.audio.processor import check_samples
from quire.shared.media.picture_sizes import FILES
from quire.shared.media.processor import PlaceholderExpansion, PromptTokenizer, TileLayout, no_options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from quire.shared.media.audio.waveform import F32

MIN_SAMPLES = 8000  # shorter clips are filled with silence, which the model reads as sound
LONGEST_SECONDS = 1200  # for which the model is published
CONVOLUTIONS = 3  # of stride 2


class Qwen3ASRProcessor:
    """Computes the features of a clip, with zeros to a whole number of chunks."""

    def __init__(self, settings: MelSettings, placeholder: int, *, chunk_frames: int, min_samples: int) -> None:
        """`chunk_frames`: frames that the encoder's convolutions see at once."""
        self.placeholder = placeholder
        self._settings, self._chunk, self._min_samples = settings, chunk_frames, min_samples
        self.rate, self.max_samples = settings.rate, LONGEST_SECONDS * settings.rate
        self.max_embeddings = num_rows(self.max_samples // settings.hop_length, chunk_frames)

    def sound_layout(self, num_samples: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns one tile of whole chunks; numbers: frames of sound. Raises InvalidArgument for options, and for clips
        that are empty or longer than LONGEST_SECONDS."""
        no_options(options)
        check_samples(num_samples, 1, self.max_samples, self.rate)
        # One frame for each hop that begins before the end, but for the last of sound that ends inside of one.
        samples, hop = max(num_samples, self._min_samples), self._settings.hop_length
        frames = samples // hop
        width = -(-frames // self._chunk) * self._chunk
        return TileLayout(1, self._settings.bins, width, (frames,), is_sound=True)

    def features(self, samples: F32, layout: TileLayout) -> F32:
        """Returns the features of the sound, and zeros after it, [1, bins, frames]."""
        whole = log_mel(samples, self._settings, max(len(samples), self._min_samples))
        return np.pad(whole, ((0, 0), (0, layout.width - whole.shape[1])))[None]

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for each row of the encoder."""
        count = num_rows(layout.numbers[0], self._chunk)
        return PlaceholderExpansion((self.placeholder,) * count, ((0, count),))


def num_rows(frames: int, chunk_frames: int) -> int:
    """Returns the number of rows that the encoder computes of so many frames."""
    chunks, rest = divmod(frames, chunk_frames)
    return chunks * _after_convolutions(chunk_frames) + _after_convolutions(rest)


def _after_convolutions(frames: int) -> int:
    for _ in range(CONVOLUTIONS):
        frames = (frames + 1) // 2
    return frames


def make_qwen3_asr(folder: Path, config: Mapping[str, Any]) -> Qwen3ASRProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    name, values = next((name, json.loads((folder / name).read_text())) for name in FILES if (folder / name).is_file())
    values = {"feature_size": 128, **values.get("feature_extractor", values)}
    settings, audio = read_mel_settings(values, name), config["audio_config"]
    window, bins = audio.get("n_window", 50), audio.get("num_mel_bins", 128)
    if settings.bins != bins or values.get("n_window", 50) != window:
        raise InvalidArgument(
            f"{name}: feature_size {settings.bins} and n_window {values.get('n_window', 50)} differ from num_mel_bins "
            f"{bins} and n_window {window} of audio_config. They must be equal.",
            field="model",
        )
    least = values.get("min_length", MIN_SAMPLES)
    if not isinstance(window, int) or not 1 <= window <= 1 << 12 or not isinstance(least, int):
        raise InvalidArgument(f"{name}: n_window {window!r}, min_length {least!r}: whole numbers needed", field="model")
    placeholder = placeholder_of(config, "audio_token_id", "audio_token_index", 151_676)
    return Qwen3ASRProcessor(settings, placeholder, chunk_frames=2 * window, min_samples=least)
