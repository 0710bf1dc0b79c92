"""Content of a message (absent, a text, or a list of parts) and its reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request.conversation import MEDIA_PARTS
from quire.services.frontend.tokenizer.message_shapes.shape import TURN_CONTENT, MessageShape

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names under which templates look for the reasoning
SEPARATOR = "\n"  # between texts of one message


def text_of(content: Any) -> str:
    """Joins the texts of parts, one per line."""
    if content is None or isinstance(content, str):
        return content or ""
    return SEPARATOR.join(part["text"] for part in content if part.get("type") == "text")


def has_media(content: Any) -> bool:
    """Returns whether a content has parts that stand for media."""
    return isinstance(content, list) and any(part.get("type") in MEDIA_PARTS for part in content)


def media_of(content: Any) -> list[Any]:
    """Returns the parts of a content that stand for media."""
    return [part for part in content if part.get("type") in MEDIA_PARTS] if isinstance(content, list) else []


def reasoning_of(turn: Mapping[str, Any]) -> str:
    return next((str(turn[name]) for name in REASONING_FIELDS if turn.get(name)), "")


def last_text(content: Any) -> str:
    """Returns the text that an answer continues: that of the last part."""
    texts = [part["text"] for part in parts_of(content) if part.get("type") == "text"]
    return texts[-1] if texts else ""


def parts_of(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content or [])


def joined(first: Any, second: Any) -> Any:
    """Returns both as one content: parts if either is a list, else texts separated by an empty line."""
    if isinstance(first, list) or isinstance(second, list):
        return parts_of(first) + parts_of(second)
    return "\n\n".join(text for text in (first, second) if text)


def content_form(role: str, shape: MessageShape) -> str:
    """Returns the form in which the template reads the contents of a role: given, text or parts."""
    if role in TURN_CONTENT:
        return str(getattr(shape, role))
    return shape.system if role == "developer" else shape.user


def with_content(turn: Mapping[str, Any], shape: MessageShape) -> Mapping[str, Any]:
    """Converts the content to the template's form; an absent, null or thinking content stays unchanged."""
    content, form = turn.get("content"), content_form(turn["role"], shape)
    if content is None or form == "given" or _holds_thoughts(content) or has_media(content):
        return turn
    if form == "text":
        return turn if isinstance(content, str) else {**turn, "content": text_of(content)}
    return {**turn, "content": parts_of(content)}


def _holds_thoughts(content: Any) -> bool:
    return isinstance(content, list) and any(part.get("type") == "thinking" for part in content)
