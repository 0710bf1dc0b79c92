"""Media of a request as its edge read them; nothing is fetched or decoded yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.shared.media.modalities import IMAGE

WHITE = (255, 255, 255)


class PartOrigin(NamedTuple):
    """Place of a part in the client's request, for errors."""

    place: str = "messages: parts"  # in the plural
    kind: str = "image_url"  # type of the part, as the client calls it
    field: str = "messages"


CHAT_PART = PartOrigin()


class VideoMetadata(NamedTuple):
    """Facts about frames that a client took from a video; None: not said."""

    fps: float | None = None  # of the video, not of the frames that were taken
    total_num_frames: int | None = None
    frames_indices: tuple[int, ...] | None = None  # of the frames that were taken, in the video
    duration: float | None = None  # of the video, in seconds


NO_METADATA = VideoMetadata()


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One picture, video or clip of sound. Without `url` and `content` it refers to an earlier one by its name."""

    url: str | None = field(default=None, repr=False)  # data:, http(s): or file: URL, not parsed yet
    content: bytes | None = field(default=None, repr=False)  # a whole file
    name: str = ""  # the client's name of the item (uuid); empty: none
    fault: str = ""  # error of a part without an item, for models that take such items; empty: none
    origin: PartOrigin = CHAT_PART
    modality: str = IMAGE
    metadata: VideoMetadata | None = None  # of a video; None: that of the request's options


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How the media of a request are processed."""

    processor: Mapping[str, Any] = field(default_factory=dict)  # mm_processor_kwargs
    image_mode: str = "RGB"  # colours that pictures are reduced to before they become RGB
    background: tuple[int, int, int] = WHITE  # colour behind transparent parts
    video: Mapping[str, Any] = field(default_factory=dict)  # frames to take from videos, and options of their processor
    metadata: VideoMetadata = NO_METADATA  # of videos that are sent as frames


DEFAULT_MEDIA_OPTIONS = MediaOptions()
