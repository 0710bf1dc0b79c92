"""Prompts of the texts, pictures, and texts with pictures in a body of /v2/embed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.cohere_edge.bodies import CohereEmbedBody
from quire.services.frontend.openai_edge.body.media_parts import read_media_part
from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.services.frontend.request.request import Prompt, TextPrompt
from quire.shared.errors import InvalidArgument

IMAGES = PartOrigin("images", "", "images")
INPUTS = PartOrigin("inputs: parts", field="inputs")


def embed_prompts(body: CohereEmbedBody) -> list[Prompt]:
    """Returns one prompt for each text, picture or input; a picture is a user's message without words."""
    if body.images:
        return [_chat([conversation.content_part(MediaPart(url, origin=IMAGES))]) for url in body.images]
    if body.inputs:
        return [_mixed_prompt(one.content) for one in body.inputs]
    return [TextPrompt(text) for text in body.texts or ()]


def _mixed_prompt(content: Sequence[Mapping[str, Any]]) -> Prompt:
    """Returns the prompt of an input: its texts alone as a text, otherwise a user's message."""
    parts = [read_media_part(part, INPUTS) or _text(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return TextPrompt("\n".join(part["text"] for part in parts))
    return _chat(parts)


def _text(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a text part. Raises InvalidArgument for one without text, and Unimplemented for other types."""
    kind = part.get("type")
    if kind != "text":
        raise conversation.unsupported_part(INPUTS.place, kind, INPUTS.field)
    if not isinstance(part.get("text"), str):
        raise InvalidArgument("inputs: a part of type 'text' needs its text", field="inputs")
    return {"type": "text", "text": part["text"]}


def _chat(parts: Sequence[Mapping[str, Any]]) -> Prompt:
    return conversation.chat_prompt([conversation.message("user", parts)], add_generation_prompt=False)
