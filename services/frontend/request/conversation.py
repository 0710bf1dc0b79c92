"""Messages of a conversation in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.shared import strict_json
from quire.shared.errors import InvalidArgument, Unimplemented

NO_JSON = "INVALID_JSON"  # the key, from Anthropic's documentation, under which arguments that are no JSON come as text

# By a piece of the type of a part: what such a part holds.
MEDIA = {"image": "pictures", "audio": "sound", "video": "films", "file": "files", "document": "documents"}


def unsupported_part(place: str, kind: Any, field: str) -> Unimplemented:
    """Returns the error for parts of a message that are no text. `place`: what has the type `kind`, in the plural."""
    held = next((media for piece, media in MEDIA.items() if piece in kind), "") if isinstance(kind, str) else ""
    reason = f": models are given text only, not {held}; send what they show as text" if held else ""
    return Unimplemented(f"{place} of type {kind!r:.64} are not offered by this server{reason}", field=field)


def message(
    role: str,
    content: str | Sequence[Mapping[str, str]] | None,
    *,
    name: str | None = None,
    tool_calls: Iterable[Mapping[str, Any]] = (),
    tool_call_id: str | None = None,
    reasoning: str | None = None,
) -> dict[str, Any]:
    """Only what was given is there, since templates ask whether a key exists."""
    if not role:
        raise InvalidArgument("messages: every message needs a role", field="messages")
    written: dict[str, Any] = {"role": role, "content": content}
    if name:
        written["name"] = name
    if calls := list(tool_calls):
        written["tool_calls"] = calls
    if tool_call_id:
        written["tool_call_id"] = tool_call_id
    if reasoning:
        written["reasoning"] = reasoning  # the chat template gets it under the name that it reads
    return written


def tool_call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """`arguments`: an object, or JSON text, which the chat template gets as it needs it. Text that is no JSON is a call
    that was cut off, or the model's slip: a refusal would end the conversation, of which it stays a part."""
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
    """Of a call that the model made, for clients who read an object."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {NO_JSON: text}
