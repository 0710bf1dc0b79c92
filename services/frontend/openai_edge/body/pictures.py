"""Content parts with pictures, as clients of OpenAI's and vLLM's APIs send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import CHAT_PART, MediaPart, PartOrigin

IMAGE_URL, INPUT_IMAGE = "image_url", "input_image"


def read_picture(part: Any, origin: PartOrigin = CHAT_PART) -> Mapping[str, Any] | None:
    """Returns the content part for an image_url or input_image part, also one without a type; None for other parts. The
    error of a part without a picture is in it."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind not in (IMAGE_URL, INPUT_IMAGE) and not (kind is None and IMAGE_URL in part):
        return None
    named = origin._replace(kind=str(kind or IMAGE_URL))
    given, name = part.get(IMAGE_URL), part.get("uuid")
    url = given.get("url") if isinstance(given, dict) else given
    if fault := _fault(part, url, name, named):
        return conversation.picture(MediaPart(fault=fault, origin=named))
    return conversation.picture(MediaPart(url, name=name or "", origin=named))


def _fault(part: Mapping[str, Any], url: Any, name: Any, origin: PartOrigin) -> str:
    """Returns why a part has no picture; empty for one with a URL, or a name instead."""
    if name is not None and not isinstance(name, str):
        return f"{origin.place}: uuid must be text"
    if isinstance(url, str) or (url is None and name):
        return ""
    if url is None and part.get("file_id") is not None:
        return f"{origin.place} of type {origin.kind!r} with a file_id are not supported; send image_url"
    return f"{origin.place} of type {origin.kind!r} need image_url: a URL, or an object with a url"
