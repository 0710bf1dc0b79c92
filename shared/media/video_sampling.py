"""Choice of a video's frames: by a number of frames per second, or a number of frames."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import read_values

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from quire.shared.media.video import VideoFacts

PROCESSOR, VIDEO_FILE = "processor_config.json", "video_preprocessor_config.json"
NAMES = ("num_frames", "fps", "min_frames", "max_frames")  # options that choose frames
MOST_FRAMES = 768  # of one video, whatever a request asks for
FIELD = "mm_processor_kwargs"


class FrameSampling(NamedTuple):
    """Rule by which frames are taken. With both, `num_frames` bounds what `fps` gives."""

    num_frames: int | None = None
    fps: float | None = None
    min_frames: int = 1
    max_frames: int = MOST_FRAMES

    def replaced(self, values: Mapping[str, Any], field: str = FIELD) -> FrameSampling:
        """Returns the rule with the values of NAMES that are set; one of num_frames and fps replaces the other. Raises
        InvalidArgument, naming `field`, for other values than positive numbers and a min_frames above max_frames."""
        found = {name: values[name] for name in NAMES if values.get(name) is not None}
        for name, value in found.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            if not is_number or (name != "fps" and not isinstance(value, int)):
                kind = "a number" if name == "fps" else "a whole number"
                raise InvalidArgument(f"{field}.{name} is {value!r}; {kind} above 0 is needed", field=field)
        rule = self._replace(**found)
        if "num_frames" in found or "fps" in found:
            rule = rule._replace(num_frames=found.get("num_frames"), fps=found.get("fps"))
        if rule.max_frames > MOST_FRAMES:
            text = f"{field}.max_frames is {rule.max_frames}; at most {MOST_FRAMES} frames of a video are taken"
            raise InvalidArgument(text, field=field)
        if rule.min_frames > rule.max_frames:
            text = f"{field}.min_frames is {rule.min_frames}, more than max_frames, {rule.max_frames}; lower it"
            raise InvalidArgument(text, field=field)
        return rule

    def num_wanted(self, facts: VideoFacts) -> float:
        """Returns the number of frames to take, not rounded: between the bounds, and at most all of them."""
        if self.fps is None:
            wanted = float(self.num_frames or facts.num_frames)
            return min(wanted, self.max_frames, facts.num_frames)
        wanted = max(facts.num_frames / facts.fps * self.fps, self.min_frames)
        return min(wanted, self.num_frames or self.max_frames, self.max_frames, facts.num_frames)


def spread(num_frames: int, count: int) -> tuple[int, ...]:
    """Returns the indices of `count` frames from the first to the last one, at equal distances, rounded to even."""
    step = (num_frames - 1) / max(count - 1, 1)
    return tuple(round(index * step) for index in range(count))


def read_video_values(folder: Path) -> tuple[dict[str, Any], str]:
    """Reads the settings of a model's video processor from the first of its files that has them, as transformers does;
    returns them and the name of the file, for errors. Raises InvalidArgument as read_values()."""
    path = folder / PROCESSOR
    nested = json.loads(path.read_text()).get("video_processor") if path.is_file() else None
    if isinstance(nested, dict):
        return nested, PROCESSOR
    path = folder / VIDEO_FILE
    return (json.loads(path.read_text()), VIDEO_FILE) if path.is_file() else read_values(folder)
