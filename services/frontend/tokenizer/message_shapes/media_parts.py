"""Pictures and videos in conversations: their order, and the form in which a template reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.request.conversation import MEDIA_PARTS
from quire.services.frontend.tokenizer.message_shapes.contents import (
    SEPARATOR,
    content_form,
    has_media,
    media_of,
    text_of,
)
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape

Message = Mapping[str, Any]


def apply_shape(turns: Sequence[Message], shape: MessageShape) -> list[Message]:
    """Moves the pictures of tools' results to user turns after them, if the template does not show them there."""
    if shape.result_pictures == "kept":
        return list(turns)
    written: list[Message] = []
    moved: list[Any] = []
    for turn in turns:
        if turn["role"] != "tool" and moved:
            written.append({"role": "user", "content": moved})
            moved = []
        if turn["role"] == "tool" and (pictures := media_of(turn.get("content"))):
            moved = moved + pictures
            written.append({**turn, "content": text_of(turn["content"])})
        else:
            written.append(turn)
    return [*written, {"role": "user", "content": moved}] if moved else written


def order_of(turns: Sequence[Message]) -> list[int]:
    """Returns the indexes of the media in the order in which the template shows them."""
    return [part["number"] for turn in turns for part in media_of(turn.get("content")) if "number" in part]


def for_template(turns: Sequence[Message], shape: MessageShape, placeholders: Mapping[str, str]) -> list[Message]:
    """Returns the turns with media as the template reads them: as parts of type image or video, or as `placeholders`
    (by modality) before the text. A placeholder that stands in the text already is one of them."""
    return [_shown(turn, shape, placeholders) if has_media(turn.get("content")) else turn for turn in turns]


def _shown(turn: Message, shape: MessageShape, placeholders: Mapping[str, str]) -> Message:
    """Returns a turn with media in the form that the template reads: parts of their types, or one text, before which
    stand the placeholders that it lacks."""
    content = turn["content"]
    if shape.pictures == "parts" and content_form(turn["role"], shape) != "text":
        shown = [{"type": part["type"]} if part.get("type") in MEDIA_PARTS else part for part in content]
        return {**turn, "content": shown}
    text = text_of(content)
    missing = [placeholders[part["type"]] for part in media_of(content)]
    for placeholder in set(missing):
        for _ in range(min(text.count(placeholder), missing.count(placeholder))):
            missing.remove(placeholder)
    return {**turn, "content": SEPARATOR.join([*missing, *([text] if text else [])])}
