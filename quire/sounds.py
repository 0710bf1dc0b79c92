"""Conversion of the sound that Python programs have (arrays with their sampling rate, paths, URLs, files in memory) to
messages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument
from quire.shared.pb.inference.v1 import inference_pb2 as pb

AUDIO = "audio"
URL_SCHEMES = ("data:", "http:", "https:", "file:")
RATE = 16_000  # of an array without one: that of nearly all models
MOST_CHANNELS = 16
PARTS = ("audio", "audio_url", "input_audio")  # types of parts of messages


def prompt_parts(data: Mapping[str, Any] | None, uuids: Mapping[str, Any] | None) -> list[pb.MediaPart]:
    """Returns the clips of a prompt. `data`: multi_modal_data, `uuids`: multi_modal_uuids, both by modality. Raises
    InvalidArgument for a value that is no sound."""
    given, names = _items((data or {}).get(AUDIO)), _items((uuids or {}).get(AUDIO))
    if names and given and len(names) != len(given):
        text = f"multi_modal_uuids has {len(names)} names for {len(given)} clips; one for each is needed"
        raise InvalidArgument(text, field="multi_modal_uuids")
    given, names = given or [None] * len(names), names or [None] * len(given)
    return [media_part(clip, name) for clip, name in zip(given, names, strict=True)]


def _items(value: Any) -> list[Any]:
    """Returns the clips, or their names; a single one as a list. A pair of an array and a number is one clip."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) and not _is_pair(value) else [value]


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
    part = pb.MediaPart(name=name or "")
    if clip is None and name:
        return part
    if isinstance(clip, str) and clip.startswith(URL_SCHEMES):
        part.url = clip
    else:
        part.content = _content(clip)
    return part


def _content(clip: Any) -> bytes:
    """Returns the bytes of a clip's file; arrays become WAV files. Raises InvalidArgument for other types, and for
    files that cannot be read."""
    if isinstance(clip, bytes | bytearray | memoryview):
        return bytes(clip)
    if isinstance(clip, str | os.PathLike):
        return _read(Path(clip))
    if _is_pair(clip):
        return _wav(clip[0], clip[1])
    if hasattr(clip, "__array__"):
        return _wav(clip, RATE)
    raise InvalidArgument(
        "multi_modal_data: sound must be an array, a pair of an array and its sampling rate, a path, a URL or bytes, "
        f"got {type(clip).__name__}",
        field="multi_modal_data",
    )


def _read(path: Path) -> bytes:
    """Reads a clip's file. Raises InvalidArgument if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        text = f"multi_modal_data: cannot read {str(path)!r:.200}: {error.strerror}"
        raise InvalidArgument(text, field="multi_modal_data") from None


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
            f"multi_modal_data: an array of shape {values.shape} and type {values.dtype} at {rate} Hz is not sound; "
            "send [num_samples] of floating point from -1 to 1, or of int16, and its sampling rate",
            field="multi_modal_data",
        )
    return float_wav(values, int(rate))
