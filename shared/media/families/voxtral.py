"""Voxtral (arXiv 2507.13264): log-mel features in pieces of 30 seconds, and a token for 80 ms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quire.shared.errors import InvalidArgument
from quire.shared.media.audio.log_mel import MelSettings, log_mel
from quire.shared.media.audio.mel_files import placeholder_of, read_mel_file
from quire.shared.media.audio.processor import check_samples
from quire.shared.media.processor import PlaceholderExpansion, PromptTokenizer, TileLayout, no_options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from quire.shared.media.audio.waveform import F32

MAX_PIECES = 80  # of 30 s: the 40 minutes for which the model is published


class VoxtralProcessor:
    """Fills a clip with silence to whole pieces of 30 seconds, and computes the features of all of it at once."""

    def __init__(self, settings: MelSettings, placeholder: int, rows_of_piece: int) -> None:
        """Makes the processor of a model. `rows_of_piece`: rows that the encoder computes of one piece."""
        self.placeholder = placeholder
        self._settings, self._rows = settings, rows_of_piece
        self.rate, self.max_samples = settings.rate, MAX_PIECES * settings.chunk_samples
        self.max_embeddings = MAX_PIECES * rows_of_piece

    def sound_layout(self, num_samples: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns a tile for each piece. Raises InvalidArgument for options, and for clips that are empty or longer
        than MAX_PIECES pieces."""
        no_options(options)
        check_samples(num_samples, 1, self.max_samples, self.rate)
        pieces = -(-num_samples // self._settings.chunk_samples)
        return TileLayout(pieces, self._settings.bins, self._settings.chunk_frames, is_sound=True)

    def features(self, samples: F32, layout: TileLayout) -> F32:
        """Returns the features of the pieces, [pieces, bins, frames], limited by the loudest sound of all of them."""
        whole = log_mel(samples, self._settings, layout.num_tiles * self._settings.chunk_samples)
        return np.ascontiguousarray(whole.reshape(layout.height, layout.num_tiles, layout.width).transpose(1, 0, 2))

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for each row."""
        count = layout.num_tiles * self._rows
        return PlaceholderExpansion((self.placeholder,) * count, ((0, count),))


def make_voxtral(folder: Path, config: Mapping[str, Any]) -> VoxtralProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    settings, audio = read_mel_file(folder, config), config["audio_config"]
    width, joined = int(audio.get("hidden_size", 1280)), int(audio.get("intermediate_size", 5120))
    positions = int(audio.get("max_source_positions", 1500))
    if joined % width or positions % (joined // width):
        text = f"config.json: intermediate_size {joined} does not join whole positions of hidden_size {width}"
        raise InvalidArgument(text, field="model")
    placeholder = placeholder_of(config, "audio_token_id", "audio_token_index", 24)
    return VoxtralProcessor(settings, placeholder, positions // (joined // width))
