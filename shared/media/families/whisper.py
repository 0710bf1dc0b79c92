"""Whisper (arXiv 2212.04356): log-mel features of 30 seconds, to whose rows the decoder attends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.shared.media.audio.log_mel import MelSettings, log_mel
from quire.shared.media.audio.mel_files import read_mel_file
from quire.shared.media.audio.processor import check_samples
from quire.shared.media.processor import PlaceholderExpansion, PromptTokenizer, TileLayout, no_options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from quire.shared.media.audio.waveform import F32

NO_TOKEN = -1


class WhisperProcessor:
    """Computes the features of a clip, which silence fills up to the length that the encoder takes."""

    placeholder = NO_TOKEN
    is_attended = True

    def __init__(self, settings: MelSettings, num_rows: int) -> None:
        """`num_rows`: rows of embeddings of a clip, the same for every one."""
        self._settings = settings
        self.rate, self.max_samples = settings.rate, settings.chunk_samples
        self.max_embeddings = num_rows

    def sound_layout(self, num_samples: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns one tile of the encoder's size. Raises InvalidArgument for options, and for clips that are empty or
        longer than the encoder takes."""
        no_options(options)
        check_samples(num_samples, 1, self.max_samples, self.rate)
        return TileLayout(1, self._settings.bins, self._settings.chunk_frames, is_sound=True)

    def features(self, samples: F32, layout: TileLayout) -> F32:
        """Returns the features of the clip and of the silence after it, [1, bins, frames]."""
        return log_mel(samples, self._settings, self.max_samples)[None]

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns no tokens: none stands for a clip."""
        return PlaceholderExpansion((), ((0, self.max_embeddings),))


def make_whisper(folder: Path, config: Mapping[str, Any]) -> WhisperProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    encoder = {"num_mel_bins": config.get("num_mel_bins", 80), "max_source_positions": 1500, **config}
    return WhisperProcessor(read_mel_file(folder, {"audio_config": encoder}), encoder["max_source_positions"])
