"""Reading of the files of models whose sound becomes log-mel features."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.audio.log_mel import MelSettings, read_mel_settings
from quire.shared.media.picture_sizes import FILES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FRAMES_OF_POSITION = 2  # the second convolution of Whisper's encoder has a stride of two frames


def read_mel_file(folder: Path, config: Mapping[str, Any]) -> MelSettings:
    """Reads the settings of a model's feature extractor. `config`: config.json. Raises InvalidArgument if the folder
    has no file of them, or one that does not fit the encoder in audio_config."""
    for name in FILES:
        path = folder / name
        if path.is_file():
            values = json.loads(path.read_text())
            settings = read_mel_settings(values.get("feature_extractor", values), name)
            _check_fits(settings, config["audio_config"], name)
            return settings
    raise InvalidArgument(f"model: {folder} has no {FILES[0]}, which says how sound is processed", field="model")


def _check_fits(settings: MelSettings, audio: Mapping[str, Any], name: str) -> None:
    """Raises InvalidArgument for features that the encoder does not take."""
    bins, positions = audio.get("num_mel_bins", 128), audio.get("max_source_positions", 1500)
    if settings.bins != bins:
        text = f"{name}: feature_size is {settings.bins}, and audio_config.num_mel_bins is {bins}. They must be equal."
        raise InvalidArgument(text, field="model")
    if settings.chunk_frames != FRAMES_OF_POSITION * positions:
        raise InvalidArgument(
            f"{name}: chunk_length {settings.chunk_seconds} s gives {settings.chunk_frames} frames, and "
            f"audio_config.max_source_positions {positions} needs {FRAMES_OF_POSITION * positions}",
            field="model",
        )


def placeholder_of(config: Mapping[str, Any], name: str, other: str, default: int) -> int:
    """Returns the token that stands for a clip, by the field `name` or its `other` name. Raises InvalidArgument for a
    value that is no token id."""
    found = config.get(name, config.get(other))
    if found is None:
        return default
    if not isinstance(found, int) or isinstance(found, bool):
        raise InvalidArgument(f"config.json: {name} is {found!r}, not a token id", field="model")
    return found
