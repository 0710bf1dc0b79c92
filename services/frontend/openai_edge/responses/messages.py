"""Conversion of a conversation's items to the messages that chat templates read.

The output of one turn is several items (reasoning, a message, calls); templates expect one message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.services.frontend.openai_edge.body.media_parts import read_media_part
from quire.services.frontend.openai_edge.responses import item_schemas
from quire.services.frontend.openai_edge.responses.item_schemas import ROLES, TEXT_PARTS
from quire.services.frontend.openai_edge.responses.tools import name_in_prompt
from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import PartOrigin
from quire.shared.errors import InvalidArgument, Unimplemented

Item = Mapping[str, Any]
Content = str | list[Mapping[str, Any]]


def as_items(given: str | Sequence[Item]) -> list[Item]:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given)


def to_messages(instructions: str | None, items: Iterable[Item]) -> list[Mapping[str, Any]]:
    """Converts the instructions, which become the first system message, and the items to messages. Raises
    InvalidArgument or Unimplemented with the place of the item, as input[0]."""
    turn = _MessageBuilder()
    if instructions:
        turn.add_message("system", instructions)
    for number, item in enumerate(items):
        turn.add(item, f"input[{number}]")
    return turn.finish()


class _MessageBuilder:
    """Builder that collects an assistant's items up to another role's."""

    def __init__(self) -> None:
        self._written: list[Mapping[str, Any]] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Mapping[str, Any]] = []

    def add(self, item: Item, place: str) -> None:
        """Adds one item to the turn, or ends the assistant's turn and adds a message. Items that templates cannot
        show are skipped; raises Unimplemented for unknown types, with a remedy if there is one."""
        match item.get("type") or "message":
            case "message":
                self._message(item, place)
            case "reasoning":
                self._thoughts += _thoughts(item, place)
            case kind if kind in (item_schemas.FUNCTION, item_schemas.CUSTOM, *item_schemas.FORMS):
                self._calls.append(_call(item, place))
            case kind if kind in (item_schemas.ADDED_TOOLS, *item_schemas.UNREADABLE):
                pass
            case item_schemas.AGENT:
                self.add_message("user", _agent(item, place))
            case kind if kind in item_schemas.OUTPUTS:
                self._end_turn()
                output = _output(item, f"{place}.output")
                call_id = str(item.get("call_id") or "")
                self._written.append(conversation.message("tool", output, tool_call_id=call_id))
            case kind:
                remedy = (
                    f"; {item_schemas.REPLACEMENTS[kind]}"
                    if isinstance(kind, str) and kind in item_schemas.REPLACEMENTS
                    else ""
                )
                text = f"{place}: items of type {kind!r:.64} are not supported by this server{remedy}"
                raise Unimplemented(text, field="input")

    def _message(self, item: Item, place: str) -> None:
        """Adds a message item; an assistant's text is joined to the open turn. Raises InvalidArgument for another
        role."""
        role = str(item.get("role") or "")
        if role not in ROLES:
            raise InvalidArgument(
                f"{place}: role must be user, assistant, system or developer, got {role!r:.64}", field="input"
            )
        if role == "assistant":
            self._texts.append(_text(item.get("content"), f"{place}.content"))
        elif role == "user":
            self.add_message(role, _content(item.get("content"), f"{place}.content"))
        else:
            self.add_message(role, _text(item.get("content"), f"{place}.content"))

    def add_message(self, role: str, text: Content) -> None:
        """Adds a message; consecutive system messages are merged, since most templates accept only one."""
        self._end_turn()
        if role == "system" and self._written and self._written[-1]["role"] == "system":
            text = f"{self._written.pop()['content']}\n\n{text}"
        self._written.append(conversation.message(role, text))

    def _end_turn(self) -> None:
        """Writes the assistant's texts, reasoning and calls so far as one message and clears them. Reasoning without
        a text or a call is dropped."""
        if self._texts or self._calls:
            text = "\n".join(self._texts) if self._texts else None
            thoughts = "\n".join(self._thoughts)
            self._written.append(conversation.message("assistant", text, tool_calls=self._calls, reasoning=thoughts))
        self._texts, self._thoughts, self._calls = [], [], []

    def finish(self) -> list[Mapping[str, Any]]:
        self._end_turn()
        return self._written


def _call(item: Item, place: str) -> Mapping[str, Any]:
    """Converts a call item; a namespace is joined to the name. Raises InvalidArgument unless name and arguments are
    texts."""
    name, arguments = _called(item, place)
    if not isinstance(name, str) or not isinstance(arguments, str | dict):
        text = f"{place}: a {item['type']} needs a name and arguments (custom_tool_call: input), both texts"
        raise InvalidArgument(text, field="input")
    name = name_in_prompt(name, item.get("namespace"))
    return conversation.tool_call(str(item.get("call_id") or ""), name, arguments)


def _called(item: Item, place: str) -> tuple[Any, Any]:
    """Returns the name of the tool and its arguments, an object or JSON text."""
    kind = item["type"]
    if kind in item_schemas.FORMS:
        name, field = item_schemas.FORMS[kind]
        if not isinstance(action := item.get(field), dict):
            raise InvalidArgument(f"{place}: a {kind} needs an {field}, an object", field="input")
        return name, {key: value for key, value in action.items() if key != "type" or field != "action"}
    if kind == item_schemas.CUSTOM:
        text = item.get("input")
        return item.get("name"), {"input": text} if isinstance(text, str) else None
    return item.get("name"), item.get("arguments")


def _output(item: Item, place: str) -> Content:
    """Returns a tool's output, in which there may be pictures; structures become JSON, since older Codex versions
    send an object."""
    output = item.get("output")
    is_text = item["type"] in (f"{item_schemas.FUNCTION}_output", f"{item_schemas.CUSTOM}_output")
    if isinstance(output, dict) or (isinstance(output, list) and not is_text):
        return json.dumps(output, ensure_ascii=False)
    return _content(output, place)


def _agent(item: Item, place: str) -> str:
    """Returns the message of another agent of the client, without its encrypted parts."""
    parts = item.get("content")
    if isinstance(parts, list):
        parts = [part for part in parts if not (isinstance(part, dict) and part.get("type") == "encrypted_content")]
    return f"Message from {item.get('author') or 'another agent'}:\n{_text(parts, f'{place}.content')}"


def _thoughts(item: Item, place: str) -> list[str]:
    """Returns the reasoning, or its summary if there is none."""
    content, summary = _texts(item.get("content"), place), _texts(item.get("summary"), place)
    return content or summary


def _texts(parts: Any, place: str) -> list[str]:
    """Returns the texts of reasoning parts of any type, empty for None; raises InvalidArgument for anything but a
    list."""
    if parts is None:
        return []
    if not isinstance(parts, list):
        raise InvalidArgument(f"{place}: content and summary of reasoning must be lists of parts", field="input")
    return [_text_of(part, place) for part in parts]


def _text_of(part: Any, place: str) -> str:
    """Returns the text of one part of reasoning, "" if absent; raises InvalidArgument if it is not text."""
    text = part.get("text", "") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise InvalidArgument(f"{place}: a part of reasoning must have its text in text", field="input")
    return text


def _content(content: Any, place: str) -> Content:
    """Returns a content as text, or as parts if there are pictures in it. Raises InvalidArgument for other values."""
    parts = content if isinstance(content, list) else []
    pictures = [read_media_part(part, PartOrigin(f"{place}: parts", field="input")) for part in parts]
    if not any(pictures):
        return _text(content, place)
    return [
        picture or {"type": "text", "text": _part(part, place)} for part, picture in zip(parts, pictures, strict=True)
    ]


def _text(content: Any, place: str) -> str:
    """Returns an item's content as text, parts joined by newlines, None as ""; raises InvalidArgument for other
    values."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidArgument(f"{place} must be text or a list of parts", field="input")
    return "\n".join(_part(part, place) for part in content)


def _part(part: Any, place: str) -> str:
    """Returns the text of one content part; raises InvalidArgument for parts of unsupported types and parts without
    text."""
    kind = part.get("type") if isinstance(part, dict) else None
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is not None and isinstance(part.get(key), str):
        return str(part[key])
    raise conversation.unsupported_part(f"{place}: parts", kind, "input")
