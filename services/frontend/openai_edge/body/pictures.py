"""Content parts with pictures, as clients of OpenAI's and vLLM's APIs send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import CHAT_PART, MediaPart, PartOrigin
from quire.shared.errors import InvalidArgument

IMAGE_URL, INPUT_IMAGE = "image_url", "input_image"


def read_picture(part: Any, origin: PartOrigin = CHAT_PART) -> Mapping[str, Any] | None:
    """Returns the content part for an image_url or input_image part, also one without a type; None for other parts.
    Raises InvalidArgument for one without a picture."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind not in (IMAGE_URL, INPUT_IMAGE) and not (kind is None and IMAGE_URL in part):
        return None
    named = origin._replace(kind=str(kind or IMAGE_URL))
    name = part.get("uuid")
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"{named.place}: uuid must be text", field=named.field)
    return conversation.picture(MediaPart(_url(part, named, name or ""), name=name or "", origin=named))


def _url(part: Mapping[str, Any], origin: PartOrigin, name: str) -> str | None:
    """Returns the URL of a part, which is a text or an object with a url; None if it has a name instead."""
    given = part.get(IMAGE_URL)
    url = given.get("url") if isinstance(given, dict) else given
    if url is None and name:
        return None
    if url is None and part.get("file_id") is not None:
        text = f"{origin.place} of type {origin.kind!r} with a file_id are not supported; send image_url"
        raise InvalidArgument(text, field=origin.field)
    if not isinstance(url, str):
        text = f"{origin.place} of type {origin.kind!r} need image_url: a URL, or an object with a url"
        raise InvalidArgument(text, field=origin.field)
    return url
