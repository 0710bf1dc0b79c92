"""Granite Speech (arXiv 2505.08699): pairs of log-mel frames, and three tokens for 15 pairs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.shared.errors import InvalidArgument
from quire.shared.media.audio.log_mel import MelSettings, log_mel
from quire.shared.media.audio.mel_files import placeholder_of
from quire.shared.media.audio.processor import check_samples
from quire.shared.media.picture_sizes import FILES
from quire.shared.media.processor import PlaceholderExpansion, PromptTokenizer, TileLayout, no_options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from quire.shared.media.audio.waveform import F32

PAIR = 2  # frames that the encoder gets as one
LONGEST_SECONDS = 600
SIZES = {"sampling_rate": 16_000, "n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80}


class GraniteSpeechProcessor:
    """Computes the features of a clip, two frames joined, without a last odd one."""

    def __init__(self, settings: MelSettings, placeholder: int, *, window: int, num_queries: int) -> None:
        """`window`: pairs of frames of which the projector makes `num_queries` rows."""
        self.placeholder = placeholder
        self._settings, self._window, self._num_queries = settings, window, num_queries
        self.rate, self.max_samples = settings.rate, LONGEST_SECONDS * settings.rate
        self.max_embeddings = self._num_rows(self._num_pairs(self.max_samples))
        self.min_samples = settings.n_fft // 2 + 1  # of the reflection at the ends

    def sound_layout(self, num_samples: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns one tile of pairs of frames. Raises InvalidArgument for options, and for clips that are too short or
        longer than LONGEST_SECONDS."""
        no_options(options)
        check_samples(num_samples, self.min_samples, self.max_samples, self.rate)
        return TileLayout(1, self._num_pairs(num_samples), PAIR * self._settings.bins, is_sound=True)

    def features(self, samples: F32, layout: TileLayout) -> F32:
        """Returns the features of the clip, [1, pairs, 2 * bins]."""
        frames = log_mel(samples, self._settings)[:, : PAIR * layout.height]
        return np.ascontiguousarray(frames.T.reshape(1, layout.height, layout.width))

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for each row."""
        count = self._num_rows(layout.height)
        return PlaceholderExpansion((self.placeholder,) * count, ((0, count),))

    def _num_pairs(self, num_samples: int) -> int:
        return (num_samples // self._settings.hop_length + 1) // PAIR

    def _num_rows(self, pairs: int) -> int:
        return -(-pairs // self._window) * self._num_queries


def make_granite_speech(folder: Path, config: Mapping[str, Any]) -> GraniteSpeechProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    name, values = next((name, json.loads((folder / name).read_text())) for name in FILES if (folder / name).is_file())
    values = values.get("audio_processor", values.get("feature_extractor", values))
    values = {**SIZES, **values.get("melspec_kwargs", {}), **values}
    sizes = {key: values[key] for key in SIZES}
    window, rate = config.get("window_size", 15), config.get("downsample_rate", 5)
    for key, value in {**sizes, "window_size": window, "downsample_rate": rate}.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
            raise InvalidArgument(f"{name}: {key} is {value!r}; a positive whole number is needed", field="model")
    bins = (config.get("encoder_config") or {}).get("input_dim", PAIR * sizes["n_mels"])
    if bins != PAIR * sizes["n_mels"] or sizes["win_length"] > sizes["n_fft"] or window < rate:
        raise InvalidArgument(
            f"{name}: n_mels {sizes['n_mels']}, win_length {sizes['win_length']} and n_fft {sizes['n_fft']} do not fit "
            f"input_dim {bins}, window_size {window} and downsample_rate {rate} of config.json",
            field="model",
        )
    settings = MelSettings(
        sizes["n_mels"],
        sizes["sampling_rate"],
        sizes["n_fft"],
        sizes["hop_length"],
        window=sizes["win_length"],
        is_htk=True,
        has_last_frame=True,
    )
    placeholder = placeholder_of(config, "audio_token_index", "audio_token_id", 49_155)
    return GraniteSpeechProcessor(settings, placeholder, window=window, num_queries=window // rate)
