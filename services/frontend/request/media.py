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


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One picture or clip of sound. Without `url` and `content` it refers to an earlier one by its name."""

    url: str | None = field(default=None, repr=False)  # data:, http(s): or file: URL, not parsed yet
    content: bytes | None = field(default=None, repr=False)  # a whole file
    name: str = ""  # the client's name of the item (uuid); empty: none
    fault: str = ""  # error of a part without an item, for models that take such items; empty: none
    origin: PartOrigin = CHAT_PART
    modality: str = IMAGE


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How the pictures of a request are processed."""

    processor: Mapping[str, Any] = field(default_factory=dict)  # mm_processor_kwargs
    image_mode: str = "RGB"  # colours that pictures are reduced to before they become RGB
    background: tuple[int, int, int] = WHITE  # colour behind transparent parts


DEFAULT_MEDIA_OPTIONS = MediaOptions()
