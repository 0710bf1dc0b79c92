"""Conversion of the media of Python programs to messages: multi_modal_data of prompts, and parts of chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quire import media_sources, pictures, sounds, videos
from quire.shared.errors import InvalidArgument
from quire.shared.media.modalities import AUDIO, IMAGE, VIDEO
from quire.shared.pb.inference.v1 import inference_pb2 as pb


class MediaForm(NamedTuple):
    """Conversion of the items of one modality."""

    listed: Callable[[Any], list[Any]]  # returns what multi_modal_data has as a list of items
    media_part: Callable[[Any, str | None], pb.MediaPart]  # of an item and its name


FORMS: Mapping[str, MediaForm] = {
    IMAGE: MediaForm(media_sources.listed, pictures.media_part),
    VIDEO: MediaForm(videos.listed, videos.media_part),
    AUDIO: MediaForm(sounds.listed, sounds.media_part),
}


def add_media(request: pb.GenerateRequest, data: Mapping[str, Any] | None, uuids: Mapping[str, Any] | None) -> None:
    """Adds the media of a prompt to a request. `data`: multi_modal_data, `uuids`: multi_modal_uuids, both by modality.
    Raises InvalidArgument for other modalities, and for a value that is no such item."""
    for field, by_modality in ((media_sources.FIELD, data), ("multi_modal_uuids", uuids)):
        for modality in by_modality or ():
            if modality not in FORMS:
                text = f"{field}: {modality!r} is not supported; available: {', '.join(FORMS)}"
                raise InvalidArgument(text, field=field)
    fields = {IMAGE: request.images, VIDEO: request.videos, AUDIO: request.audios}
    for modality, field_of_request in fields.items():
        field_of_request.extend(_prompt_parts(modality, data or {}, uuids or {}))


def add_embed_media(added: pb.EmbedInput, data: Mapping[str, Any] | None, uuids: Mapping[str, Any] | None) -> None:
    """Adds pictures and videos to an input of a pooling request, as add_media()."""
    request = pb.GenerateRequest()
    add_media(request, data, uuids)
    if request.audios:
        text = f"{media_sources.FIELD}: {AUDIO!r} is not supported for vectors; available: {IMAGE}, {VIDEO}"
        raise InvalidArgument(text, field=media_sources.FIELD)
    added.images.extend(request.images)
    added.videos.extend(request.videos)


def _prompt_parts(modality: str, data: Mapping[str, Any], uuids: Mapping[str, Any]) -> list[pb.MediaPart]:
    """Returns the items of one modality. Raises InvalidArgument for another number of names than of items, and for a
    value that is no such item."""
    form = FORMS[modality]
    given, names = form.listed(data.get(modality)), media_sources.listed(uuids.get(modality))
    if names and given and len(names) != len(given):
        text = f"multi_modal_uuids has {len(names)} names for {len(given)} {modality} items; one for each is needed"
        raise InvalidArgument(text, field="multi_modal_uuids")
    given, names = given or [None] * len(names), names or [None] * len(given)
    return [form.media_part(item, name) for item, name in zip(given, names, strict=True)]


def content_parts(content: Sequence[Any]) -> list[pb.ContentPart]:
    """Returns the parts of a message in OpenAI's form, or with objects that multi_modal_data may have. Raises
    InvalidArgument for others."""
    return [_content_part(part) for part in content]


def _content_part(part: Any) -> pb.ContentPart:
    """Converts one part. Raises InvalidArgument for a type that is neither text nor one of the modalities."""
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if isinstance(part.get("text"), str):
        return pb.ContentPart(text=part["text"])
    if pictures.is_part(part):
        return pb.ContentPart(image=pictures.message_part(part))
    if videos.is_part(part):
        return pb.ContentPart(video=videos.message_part(part))
    if sounds.is_part(part):
        return pb.ContentPart(audio=sounds.message_part(part))
    text = f"messages: parts of type {part.get('type')!r} are not supported; send text, images, videos and audio"
    raise InvalidArgument(text, field="messages")
