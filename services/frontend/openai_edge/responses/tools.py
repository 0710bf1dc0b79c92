"""`tools` and `tool_choice` of a body, which are written without the inner object that chat completions have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.openai_edge.body import tools as chat_tools
from services.frontend.request.tool_offer import AUTO, NONE, ToolOffer
from shared.errors import Unimplemented

Json = Mapping[str, Any]

INNER = ("name", "description", "parameters", "strict")


def read(tools: Sequence[Json] | None, choice: Any, *, parallel: bool) -> ToolOffer:
    """An empty list of tools is none, and may have a choice that asks for nothing."""
    if not tools:
        return chat_tools.read(None, None if choice in (AUTO, NONE) else choice, parallel=parallel)
    nested = [_nested(number, tool) for number, tool in enumerate(tools)]
    return chat_tools.read(nested, _nested_choice(choice), parallel=parallel)


def _nested(number: int, tool: Json) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise Unimplemented(f"tools[{number}]: tools of type {kind!r} are not offered by this server", field="tools")
    inner = {name: tool[name] for name in INNER if tool.get(name) is not None}
    return {"type": "function", "function": inner}


def _nested_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        named = [_nested_name(tool) for tool in listed] if isinstance(listed, list) else listed
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice


def _nested_name(tool: Any) -> dict[str, Any]:
    name = tool.get("name") if isinstance(tool, dict) else None
    return {"type": "function", "function": {"name": name}}
