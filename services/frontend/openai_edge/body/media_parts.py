"""Content parts with pictures, videos and sound, as clients of OpenAI's and vLLM's APIs send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import CHAT_PART, MediaPart, PartOrigin
from quire.shared.media.modalities import AUDIO, IMAGE, VIDEO

IMAGE_URL, INPUT_IMAGE, VIDEO_URL, AUDIO_URL = "image_url", "input_image", "video_url", "audio_url"
INPUT_AUDIO = "input_audio"
# By type: field with the URL.
URL_FIELDS = {IMAGE_URL: IMAGE_URL, INPUT_IMAGE: IMAGE_URL, VIDEO_URL: VIDEO_URL, AUDIO_URL: AUDIO_URL}
MODALITIES = {IMAGE_URL: IMAGE, VIDEO_URL: VIDEO, AUDIO_URL: AUDIO}  # by that field
URL_SCHEMES = ("data:", "http:", "https:", "file:")


def read_media_part(part: Any, origin: PartOrigin = CHAT_PART) -> Mapping[str, Any] | None:
    """Returns the content part for an image_url, input_image, video_url, audio_url or input_audio part, also without a
    type; None for other parts. The error of a part without an item is in it."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind == INPUT_AUDIO or (kind is None and INPUT_AUDIO in part):
        return conversation.content_part(_input_audio(part, origin._replace(kind=INPUT_AUDIO)))
    if kind is None:
        kind = next((name for name in MODALITIES if name in part), None)
    url_field = URL_FIELDS.get(kind) if isinstance(kind, str) else None
    if url_field is None:
        return None
    named, modality = origin._replace(kind=str(kind)), MODALITIES[url_field]
    given, name = part.get(url_field), part.get("uuid")
    url = given.get("url") if isinstance(given, dict) else given
    if fault := _fault(part, url, name, named, url_field):
        return conversation.content_part(MediaPart(fault=fault, origin=named, modality=modality))
    return conversation.content_part(MediaPart(url, name=name or "", origin=named, modality=modality))


def _input_audio(part: Mapping[str, Any], origin: PartOrigin) -> MediaPart:
    """Returns the sound of an input_audio part: base64 text, or a URL in its place, as some services take it."""
    given, name = part.get(INPUT_AUDIO), part.get("uuid")
    data, form = (given.get("data"), given.get("format")) if isinstance(given, dict) else (given, None)
    fault = ""
    if name is not None and not isinstance(name, str):
        fault = f"{origin.place}: uuid must be text"
    elif not (isinstance(data, str) and data) and not (data is None and name):
        fault = (
            f'{origin.place} of type {INPUT_AUDIO!r} need {INPUT_AUDIO}: an object {{"data": base64, "format": "wav"}}'
        )
    if fault:
        return MediaPart(fault=fault, origin=origin, modality=AUDIO)
    if isinstance(data, str) and not data.startswith(URL_SCHEMES):
        data = f"data:audio/{form if isinstance(form, str) else ''};base64,{data}"
    return MediaPart(data, name=name or "", origin=origin, modality=AUDIO)


def _fault(part: Mapping[str, Any], url: Any, name: Any, origin: PartOrigin, url_field: str) -> str:
    """Returns why a part has no item; empty for one with a URL, or a name instead."""
    if name is not None and not isinstance(name, str):
        return f"{origin.place}: uuid must be text"
    if isinstance(url, str) or (url is None and name):
        return ""
    if url is None and part.get("file_id") is not None:
        return f"{origin.place} of type {origin.kind!r} with a file_id are not supported; send {url_field}"
    return f"{origin.place} of type {origin.kind!r} need {url_field}: a URL, or an object with a url"
