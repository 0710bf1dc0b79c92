"""Items of a conversation as chat templates read them.

What a model writes in one turn comes as several items (reasoning, a message, calls); templates want one message of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.frontend.openai_edge.responses import said
from services.frontend.openai_edge.responses.said import ROLES, TEXT_PARTS
from services.frontend.openai_edge.responses.tools import name_in_prompt
from services.frontend.request import conversation
from shared.errors import InvalidArgument, Unimplemented

Item = Mapping[str, Any]


def as_items(given: str | Sequence[Item]) -> list[Item]:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else list(given)


def turns(instructions: str | None, items: Iterable[Item]) -> list[Mapping[str, Any]]:
    turn = _Turns()
    if instructions:
        turn.add_message("system", instructions)
    for number, item in enumerate(items):
        turn.add(item, f"input[{number}]")
    return turn.finish()


class _Turns:
    """Collects an assistant's items until somebody else speaks."""

    def __init__(self) -> None:
        self._written: list[Mapping[str, Any]] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Mapping[str, Any]] = []

    def add(self, item: Item, place: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(item, place)
            case "reasoning":
                self._thoughts += _thoughts(item, place)
            case "function_call" | said.CUSTOM | said.SHELL:
                self._calls.append(_call(item, place))
            case kind if kind in said.UNREADABLE:
                pass
            case kind if kind in said.OUTPUTS:
                self._end_turn()
                output = _text(item.get("output"), f"{place}.output")
                call_id = str(item.get("call_id") or "")
                self._written.append(conversation.message("tool", output, tool_call_id=call_id))
            case kind:
                raise Unimplemented(
                    f"{place}: items of type {kind!r:.64} are not offered by this server", field="input"
                )

    def _message(self, item: Item, place: str) -> None:
        role, text = str(item.get("role") or ""), _text(item.get("content"), f"{place}.content")
        if role not in ROLES:
            raise InvalidArgument(
                f"{place}: role must be user, assistant, system or developer, got {role!r:.64}", field="input"
            )
        if role == "assistant":
            self._texts.append(text)
        else:
            self.add_message(role, text)

    def add_message(self, role: str, text: str) -> None:
        """System messages in a row become one: most templates know only one."""
        self._end_turn()
        if role == "system" and self._written and self._written[-1]["role"] == "system":
            text = f"{self._written.pop()['content']}\n\n{text}"
        self._written.append(conversation.message(role, text))

    def _end_turn(self) -> None:
        if self._texts or self._calls:
            text = "\n".join(self._texts) if self._texts else None
            thoughts = "\n".join(self._thoughts)
            self._written.append(conversation.message("assistant", text, tool_calls=self._calls, reasoning=thoughts))
        self._texts, self._thoughts, self._calls = [], [], []

    def finish(self) -> list[Mapping[str, Any]]:
        self._end_turn()
        return self._written


def _call(item: Item, place: str) -> Mapping[str, Any]:
    name, arguments = _called(item, place)
    if not isinstance(name, str) or not isinstance(arguments, str):
        text = f"{place}: a {item['type']} needs a name and arguments (custom_tool_call: input), both texts"
        raise InvalidArgument(text, field="input")
    name = name_in_prompt(name, item.get("namespace"))
    return conversation.tool_call(str(item.get("call_id") or ""), name, arguments)


def _called(item: Item, place: str) -> tuple[Any, Any]:
    """Returns the name of the tool and its arguments as JSON text, which only functions have."""
    match item["type"]:
        case said.CUSTOM:
            text = item.get("input")
            return item.get("name"), json.dumps({"input": text}) if isinstance(text, str) else None
        case said.SHELL:
            action = item.get("action")
            if not isinstance(action, dict):
                raise InvalidArgument(f"{place}: a local_shell_call needs an action, an object", field="input")
            return "local_shell", json.dumps({name: value for name, value in action.items() if name != "type"})
    return item.get("name"), item.get("arguments")


def _thoughts(item: Item, place: str) -> list[str]:
    """What was thought, or else what its summary says."""
    content, summary = _texts(item.get("content"), place), _texts(item.get("summary"), place)
    return content or summary


def _texts(parts: Any, place: str) -> list[str]:
    """Of parts of any type; None is no part."""
    if parts is None:
        return []
    if not isinstance(parts, list):
        raise InvalidArgument(f"{place}: content and summary of reasoning must be lists of parts", field="input")
    return [_text_of(part, place) for part in parts]


def _text_of(part: Any, place: str) -> str:
    text = part.get("text", "") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise InvalidArgument(f"{place}: a part of reasoning must have its text in text", field="input")
    return text


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(f"{place} must be text or a list of parts", field="input")
    return "\n".join(_part(part, place) for part in content)


def _part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is not None and isinstance(part.get(key), str):
        return str(part[key])
    raise conversation.unreadable(f"{place}: parts", kind, "input")
