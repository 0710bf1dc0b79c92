"""Qwen2-Audio (arXiv 2407.10759): log-mel features of up to 30 seconds, and a token for 40 ms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.shared.media.audio.log_mel import MelSettings, log_mel
from quire.shared.media.audio.mel_files import placeholder_of, read_mel_file
from quire.shared.media.audio.processor import check_samples
from quire.shared.media.processor import PlaceholderExpansion, PromptTokenizer, TileLayout, no_options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from quire.shared.media.audio.waveform import F32


class Qwen2AudioProcessor:
    """Computes the features of a clip. Those of the silence with which transformers fills 30 seconds are left out: the
    encoder does not attend to them."""

    def __init__(self, settings: MelSettings, placeholder: int) -> None:
        self.placeholder = placeholder
        self._settings = settings
        self.rate, self.max_samples = settings.rate, settings.chunk_samples
        self.max_embeddings = _positions(settings.chunk_frames) // 2
        self.min_samples = 2 * settings.hop_length + 1  # of the first token

    def sound_layout(self, num_samples: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns one tile; numbers: positions of the encoder that are sound. Raises InvalidArgument for options, and
        for clips without a token or longer than 30 s."""
        no_options(options)
        check_samples(num_samples, self.min_samples, self.max_samples, self.rate)
        positions = _positions(-(-num_samples // self._settings.hop_length))
        # The second convolution reads up to one frame after twice the last position.
        width = min(2 * positions + 1, self._settings.chunk_frames)
        return TileLayout(1, self._settings.bins, width, (positions,), is_sound=True)

    def features(self, samples: F32, layout: TileLayout) -> F32:
        """Returns the features of the frames that the encoder reads, [1, bins, frames]."""
        return log_mel(samples, self._settings, self.max_samples)[None, :, : layout.width]

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for two positions of the encoder."""
        count = layout.numbers[0] // 2
        return PlaceholderExpansion((self.placeholder,) * count, ((0, count),))


def _positions(num_frames: int) -> int:
    """Returns the number of the encoder's positions for `num_frames` frames of sound."""
    return (num_frames - 1) // 2 + 1


def make_qwen2_audio(folder: Path, config: Mapping[str, Any]) -> Qwen2AudioProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    settings = read_mel_file(folder, config)
    return Qwen2AudioProcessor(settings, placeholder_of(config, "audio_token_index", "audio_token_id", 151_646))
