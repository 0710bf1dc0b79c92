"""Conversion of the videos that Python programs have (arrays of frames, lists of pictures, paths, URLs, files in
memory) to messages."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from quire.media_sources import FIELD, source_part
from quire.shared.errors import InvalidArgument
from quire.shared.pb.inference.v1 import inference_pb2 as pb

PARTS = ("video_url", "video")  # types of parts of messages
FRAMES, CHANNELS = 4, 3  # dimensions of an array of frames, and its last or second one


def listed(items: Any) -> list[Any]:
    """Returns videos as a list: one alone, several, or None for none. A tuple is one video with its metadata, and a
    list of pictures is one video."""
    if items is None:
        return []
    if isinstance(items, list) and not (items and _is_frame(items[0])):
        return items
    return [items]


def is_part(part: Mapping[str, Any]) -> bool:
    """Returns whether a part of a message is a video, also without a type."""
    return part.get("type") in PARTS or "video_url" in part


def message_part(part: Mapping[str, Any]) -> pb.MediaPart:
    """Returns the video of a part: of type video with what media_part() takes, or video_url. Raises InvalidArgument for
    a value that is no video."""
    video = next((part[name] for name in PARTS if part.get(name) is not None), None)
    return media_part(video.get("url") if isinstance(video, Mapping) else video, part.get("uuid"))


def media_part(video: Any, name: str | None = None) -> pb.MediaPart:
    """Returns the message for one video: a URL, a path, the bytes of a file, frames, or a tuple of frames and their
    metadata. `name`: under which the frontend keeps it; without `video`, that of an earlier one. Raises InvalidArgument
    for values that are no video."""
    if not isinstance(video, tuple):
        return source_part(video, name, _file)
    if len(video) != 2 or not isinstance(video[1] or {}, Mapping):
        raise _no_video(f"a tuple of {len(video)}; (frames, metadata) is needed, with a dictionary as metadata")
    part = source_part(video[0], name, _file)
    _add_metadata(part, video[1] or {})
    return part


def _add_metadata(part: pb.MediaPart, metadata: Mapping[str, Any]) -> None:
    """Adds fps, total_num_frames, frames_indices and duration, as vLLM's users write them. Raises InvalidArgument for
    values of other types."""
    try:
        frames = pb.VideoFrames(
            fps=metadata.get("fps") or 0.0,
            total_num_frames=metadata.get("total_num_frames") or 0,
            duration_s=metadata.get("duration") or 0.0,
        )
        if metadata.get("frames_indices") is not None:
            frames.frames_indices.extend(int(index) for index in metadata["frames_indices"])
    except (TypeError, ValueError):
        raise _no_video(f"metadata {dict(metadata)!r:.200} with values that are no numbers") from None
    part.frames.CopyFrom(frames)


def _file(video: Any) -> bytes:
    """Returns frames as a .npy file. Raises InvalidArgument for other types."""
    if hasattr(video, "__array__") or (isinstance(video, list) and video):
        return _npy(video)
    raise _no_video(type(video).__name__)


def _npy(frames: Any) -> bytes:
    """Returns frames, [num_frames, height, width, 3] or [num_frames, 3, height, width], 8-bit or floating point from 0
    to 1, as a .npy file. Raises InvalidArgument for others."""
    import numpy as np

    try:
        values = np.stack([_rgb(one) for one in frames]) if isinstance(frames, list) else np.asarray(frames)
    except ValueError:
        raise _no_video("frames of different sizes; all frames of a video must have one size") from None
    if values.ndim == FRAMES and values.shape[3] != CHANNELS and values.shape[1] == CHANNELS:
        values = values.transpose(0, 2, 3, 1)
    if np.issubdtype(values.dtype, np.floating) and values.size and values.min() >= 0.0 and values.max() <= 1.0:
        values = (values * 255.0 + 0.5).astype(np.uint8)
    if values.ndim != FRAMES or values.shape[3] != CHANNELS or values.dtype != np.uint8:
        raise _no_video(
            f"an array of shape {values.shape} and type {values.dtype}; [num_frames, height, width, 3] of type uint8, "
            "or of floating point from 0 to 1, is needed"
        )
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(values))
    return stream.getvalue()


def _rgb(frame: Any) -> Any:
    """Returns one frame as an array; images of Pillow become RGB."""
    import numpy as np

    return np.asarray(frame.convert("RGB") if hasattr(frame, "getexif") else frame)


def _is_frame(value: Any) -> bool:
    """Returns whether a value is a single picture, not a video."""
    return hasattr(value, "getexif") or (hasattr(value, "__array__") and getattr(value, "ndim", 0) == FRAMES - 1)


def _no_video(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{FIELD}: a video must be an array of frames, a list of pictures, (frames, metadata), a path, a URL or bytes, "
        f"got {what}",
        field=FIELD,
    )
