"""Blocks with pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import MediaPart, PartOrigin

IMAGE = "image"
DEFAULT_TYPE = "image/jpeg"  # where a source names none


def read_image(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns the content part of an image block, whose source is base64 or a URL. The error of another one is in it.
    `place`: of the content, for errors."""
    origin = PartOrigin(f"{place}: blocks", IMAGE, place.partition("[")[0])
    url = _url(block)
    if url is None:
        fault = (
            f"{origin.place} of type {IMAGE!r} are not supported without a source of type base64 with its data, or of "
            "type url with its url"
        )
        return conversation.content_part(MediaPart(fault=fault, origin=origin))
    return conversation.content_part(MediaPart(url, origin=origin))


def _url(block: Mapping[str, Any]) -> str | None:
    """Returns the URL of a block's source; base64 becomes a data: URL. None for other sources."""
    source = block.get("source")
    if isinstance(source, Mapping):
        if source.get("type") == "base64" and isinstance(data := source.get("data"), str):
            return f"data:{source.get('media_type') or DEFAULT_TYPE};base64,{data}"
        if source.get("type") == "url" and isinstance(url := source.get("url"), str):
            return url
    return None
