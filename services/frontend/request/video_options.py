"""media_io_kwargs of videos: frames to take, and facts about frames that a client took itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request.media import VideoMetadata
from quire.shared.errors import InvalidArgument

ALL = -1  # num_frames: all frames; fps: not set
FRAMES = ("num_frames", "fps", "do_sample_frames")
FACTS = ("frames_indices", "total_num_frames", "duration")
MOST_NUMBERS = 100_000  # in frames_indices


def read_video_io(given: Any) -> tuple[dict[str, Any], VideoMetadata]:
    """Returns the options of media_io_kwargs.video that choose frames, and the facts about frames that were sent.
    Raises InvalidArgument for unknown options and wrong values."""
    if not isinstance(given, Mapping):
        raise _wrong("", f"must be an object, got {given!r:.64}")
    for name in given:
        if name not in (*FRAMES, *FACTS):
            raise _wrong("", f"has no option {name!r:.64}; known: {', '.join((*FRAMES, *FACTS))}")
    frames: dict[str, Any] = {name: given[name] for name in FRAMES if given.get(name) is not None}
    if frames.get("num_frames") == ALL:
        frames.pop("num_frames")
        frames["do_sample_frames"] = frames.get("fps", ALL) != ALL
    if frames.get("fps") == ALL:
        frames.pop("fps")
    return frames, video_metadata({name: given.get(name) for name in FACTS}, "media_io_kwargs.video")


def video_metadata(given: Mapping[str, Any], field: str) -> VideoMetadata:
    """Returns the facts about frames: fps, total_num_frames, frames_indices and duration, each of which may be missing.
    Raises InvalidArgument, naming `field`, for wrong values."""
    indices = given.get("frames_indices")
    if indices is not None:
        is_list = isinstance(indices, list | tuple) and 0 < len(indices) <= MOST_NUMBERS
        if not is_list or not all(type(one) is int and 0 <= one < 1 << 31 for one in indices):
            raise _wrong(".frames_indices", "must be a list of whole numbers from 0 on", field)
        indices = tuple(indices)
    total = given.get("total_num_frames")
    if total is not None and (type(total) is not int or not 0 < total < 1 << 31):
        raise _wrong(".total_num_frames", f"is {total!r:.64}; a whole number above 0 is needed", field)
    return VideoMetadata(_number(given, "fps", field), total, indices, _number(given, "duration", field))


def _number(given: Mapping[str, Any], name: str, field: str) -> float | None:
    """Returns a number above 0; None if it is missing. Raises InvalidArgument for others."""
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _wrong(f".{name}", f"is {value!r:.64}; a number above 0 is needed", field)
    return float(value)


def _wrong(name: str, reason: str, field: str = "media_io_kwargs.video") -> InvalidArgument:
    return InvalidArgument(f"{field}{name} {reason}.", field=field.partition(".")[0])
