"""Blocks with pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.shared.errors import InvalidArgument

IMAGE = "image"
DEFAULT_TYPE = "image/jpeg"  # where a source names none


def read_image(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the content part of an image block, whose source is base64 or a URL. Raises InvalidArgument for others.
    `place`: of the content, for errors."""
    origin = PartOrigin(f"{place}: blocks", IMAGE, place.partition("[")[0])
    return conversation.picture(MediaPart(_url(block, origin), origin=origin))


def _url(block: Mapping[str, Any], origin: PartOrigin) -> str:
    """Returns the URL of a block's source; base64 becomes a data: URL."""
    source = block.get("source")
    if isinstance(source, Mapping):
        if source.get("type") == "base64" and isinstance(data := source.get("data"), str):
            return f"data:{source.get('media_type') or DEFAULT_TYPE};base64,{data}"
        if source.get("type") == "url" and isinstance(url := source.get("url"), str):
            return url
    raise InvalidArgument(
        f"{origin.place} of type {IMAGE!r} are not offered without a source of type base64 with its data, or of type "
        "url with its url",
        field=origin.field,
    )
