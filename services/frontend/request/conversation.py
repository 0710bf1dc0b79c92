"""Messages of a conversation in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.services.frontend.request.request import ChatPrompt
from quire.shared import strict_json
from quire.shared.errors import InvalidArgument, Unimplemented
from quire.shared.media.modalities import IMAGE, MODALITIES

MEDIA_PARTS = MODALITIES  # types of the parts of contents that stand for media, as chat templates know them
NO_JSON = "INVALID_JSON"  # Anthropic's documented key for tool arguments that are not valid JSON

# Substring of a part's type -> what such parts hold, for the error text.
MEDIA = {"image": "pictures", "audio": "sound", "video": "videos", "file": "files", "document": "documents"}


def unsupported_part(place: str, kind: Any, field: str, taken: Sequence[str] = (IMAGE,)) -> Unimplemented:
    """Returns the error for message parts other than text. `place`: what has the type `kind`, in the plural; an
    empty `kind`: there are no types. `taken`: modalities besides text that are taken."""
    shown = kind or place if isinstance(kind, str) else ""
    media = next((name for piece, name in MEDIA.items() if piece in shown), "")
    others = [MEDIA[name] for name in taken if MEDIA[name] != media]
    given = f"{' and '.join(['text', *others])} only"
    reason = f": models are given {given}, not {media}; send their content as text" if media else ""
    of_type = "" if kind == "" else f" of type {kind!r:.64}"
    return Unimplemented(f"{place}{of_type} are not supported by this server{reason}", field=field)


def not_taken(origin: PartOrigin, taken: Sequence[str] = ()) -> Unimplemented:
    """Returns the error for media that a model without an encoder for them gets. `taken`: modalities that it takes."""
    return unsupported_part(*origin, taken)


def content_part(part: MediaPart) -> dict[str, Any]:
    """Returns a content part with a picture, video or clip of sound; chat_prompt() takes the item out of it."""
    return {"type": part.modality, "part": part}


def chat_prompt(messages: Iterable[Mapping[str, Any]], **options: Any) -> ChatPrompt:
    """Returns the prompt of a conversation whose contents may hold content_part() parts. `options`: further fields of
    ChatPrompt."""
    media: list[MediaPart] = []
    numbered = [_with_numbers(message, media) for message in messages]
    return ChatPrompt(numbered, media=media, **options)


def _with_numbers(message: Mapping[str, Any], media: list[MediaPart]) -> Mapping[str, Any]:
    """Returns the message with its media replaced by their indexes in `media`, to which they are added."""
    content = message.get("content")
    if not isinstance(content, list) or not any(isinstance(part.get("part"), MediaPart) for part in content):
        return message
    parts = []
    for part in content:
        item = part.get("part")
        if isinstance(item, MediaPart):
            media.append(item)
            parts.append({"type": item.modality, "number": len(media) - 1})
        else:
            parts.append(part)
    return {**message, "content": parts}


def message(
    role: str,
    content: str | Sequence[Mapping[str, Any]] | None,
    *,
    name: str | None = None,
    tool_calls: Iterable[Mapping[str, Any]] = (),
    tool_call_id: str | None = None,
    reasoning: str | None = None,
) -> dict[str, Any]:
    """Returns a chat message with only the given keys, since templates test whether a key exists. Raises
    InvalidArgument for an empty role."""
    if not role:
        raise InvalidArgument("messages: every message needs a role", field="messages")
    fields: dict[str, Any] = {"role": role, "content": content}
    if name:
        fields["name"] = name
    if calls := list(tool_calls):
        fields["tool_calls"] = calls
    if tool_call_id:
        fields["tool_call_id"] = tool_call_id
    if reasoning:
        fields["reasoning"] = reasoning  # renamed to the key that the chat template reads
    return fields


def tool_call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call in OpenAI's form. `arguments`: an object, or JSON text. Malformed text is kept: it is a call
    that was cut off by the model, and the conversation must remain usable. Raises InvalidArgument for JSON nested too
    deeply, NaN, or a lone surrogate."""
    if isinstance(arguments, str):
        try:
            strict_json.read(arguments or "{}")
        except json.JSONDecodeError:
            pass
        except ValueError as error:
            raise InvalidArgument(
                f"messages: arguments of tool call {call_id!r} are not JSON: {error}", field="messages"
            ) from None
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def call_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a model's tool call as an object, for clients that expect one; text that is no JSON
    object stands under the key NO_JSON."""
    try:
        arguments = json.loads(text or "{}")
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {NO_JSON: text}
