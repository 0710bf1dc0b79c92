"""Conversion of the sound that Python programs have (arrays with their sampling rate, paths, URLs, files in memory) to
messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire import media_sources
from quire.media_sources import FIELD
from quire.shared.errors import InvalidArgument
from quire.shared.pb.inference.v1 import inference_pb2 as pb

RATE = 16_000  # of an array without one: that of nearly all models
MOST_CHANNELS = 16
PARTS = ("audio", "audio_url", "input_audio")  # types of parts of messages


def listed(clips: Any) -> list[Any]:
    """Returns clips as a list: one alone, several, or None for none. A pair of an array and a number is one clip."""
    return [clips] if _is_pair(clips) else media_sources.listed(clips)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int | float)


def is_part(part: Mapping[str, Any]) -> bool:
    """Returns whether a part of a message is sound, also without a type."""
    return part.get("type") in PARTS or (part.get("type") is None and any(name in part for name in PARTS))


def message_part(part: Mapping[str, Any]) -> pb.MediaPart:
    """Returns the clip of a part: of type audio with an array, a pair, a path or bytes, audio_url, or input_audio.
    Raises InvalidArgument for a value that is no sound."""
    value = next((part[name] for name in PARTS if part.get(name) is not None), None)
    if isinstance(value, Mapping):
        value = value.get("url") or _data_url(value.get("data"), value.get("format"))
    return media_part(value, part.get("uuid"))


def _data_url(data: Any, form: Any) -> Any:
    """Returns the URL of base64 text; another value unchanged."""
    return f"data:audio/{form or ''};base64,{data}" if isinstance(data, str) else data


def media_part(clip: Any, name: str | None = None) -> pb.MediaPart:
    """Returns the message for one clip. `name`: under which the frontend keeps it; without `clip`, that of an earlier
    one. Raises InvalidArgument for values that are no sound, and if both are missing."""
    return media_sources.source_part(clip, name, _file)


def _file(clip: Any) -> bytes:
    """Returns an array, or a pair of an array and its sampling rate, as a WAV file. Raises InvalidArgument for other
    types."""
    if _is_pair(clip):
        return _wav(clip[0], clip[1])
    if hasattr(clip, "__array__"):
        return _wav(clip, RATE)
    raise InvalidArgument(
        f"{FIELD}: sound must be an array, a pair of an array and its sampling rate, a path, a URL or bytes, got "
        f"{type(clip).__name__}",
        field=FIELD,
    )


def _wav(array: Any, rate: float) -> bytes:
    """Returns samples as a WAV file of float32: [num_samples], [channels, num_samples] or [num_samples, channels], from
    -1 to 1, or 16-bit. Raises InvalidArgument for other shapes and types, and for a rate that is no whole number."""
    import numpy as np

    from quire.shared.media.audio.wav import float_wav

    values = np.asarray(array)
    if values.ndim == 2 and values.shape[0] <= MOST_CHANNELS < values.shape[1]:
        values = values.T
    if values.dtype == np.int16:
        values = values / np.float32(1 << 15)
    is_sound = values.ndim in (1, 2) and np.issubdtype(values.dtype, np.floating)
    if not is_sound or rate != int(rate) or not 0 < rate < 1 << 32:
        raise InvalidArgument(
            f"{FIELD}: an array of shape {values.shape} and type {values.dtype} at {rate} Hz is not sound; "
            "send [num_samples] of floating point from -1 to 1, or of int16, and its sampling rate",
            field=FIELD,
        )
    return float_wav(values, int(rate))
