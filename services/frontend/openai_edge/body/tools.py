"""Conversion of `tools` and `tool_choice` of a body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request.request import Tool
from quire.services.frontend.request.tool_offer import (
    AUTO,
    NONE,
    REQUIRED,
    ToolOffer,
    build_tool_offer,
    new_tool,
    text_tool,
    to_openai_tool,
)
from quire.shared.errors import InvalidArgument, Unimplemented

FUNCTION, CUSTOM = "function", "custom"
KINDS = (FUNCTION, CUSTOM)
SHAPE = ', as in {"type": "function", "function": {"name": "..."}}'


def read(tools: list[dict[str, Any]] | None, choice: Any, *, parallel: bool) -> ToolOffer:
    """Converts tools and the choice among them. An empty list, which many clients send where they have no tools, is
    none, and "auto" chooses none of them. Raises InvalidArgument for a choice that needs tools without any, and for one
    that names unknown tools. Custom tools are shown to the template as functions with one text argument."""
    if not tools:
        if choice not in (None, NONE, AUTO):
            raise InvalidArgument("tool_choice: when it is used, tools must be set", field="tool_choice")
        return ToolOffer()
    mode, name = _choice(AUTO if choice is None else choice)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = _allowed(tools, choice)
    offered = [_tool(number, tool) for number, tool in enumerate(tools)]
    shown = [
        tool if read.text_input is None else to_openai_tool(read) for tool, read in zip(tools, offered, strict=True)
    ]
    return build_tool_offer(offered, mode, name, parallel=parallel, template_tools=shown)


def _choice(choice: Any) -> tuple[str, str]:
    """Returns the mode (none, auto or required) and the name of a forced tool, which is "" otherwise. Raises
    InvalidArgument for any other form of tool_choice."""
    if isinstance(choice, str) and choice in (NONE, AUTO, REQUIRED):
        return choice, ""
    if isinstance(choice, dict):
        if choice.get("type") in KINDS and (name := _name_of(choice)):
            return REQUIRED, name
        allowed = choice.get("allowed_tools")
        if (
            choice.get("type") == "allowed_tools"
            and isinstance(allowed, dict)
            and allowed.get("mode") in (AUTO, REQUIRED)
        ):
            return str(allowed["mode"]), ""
    raise InvalidArgument(
        f"tool_choice must be none, auto, required, a function as in "
        f'{{"type": "function", "function": {{"name": "..."}}}}, or allowed_tools, got {choice!r}',
        field="tool_choice",
    )


def _allowed(tools: list[dict[str, Any]], choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Keeps the tools that `allowed_tools` names; raises InvalidArgument if it names none or an unknown one."""
    listed = choice["allowed_tools"].get("tools")
    names = {_name_of(entry) for entry in listed} if isinstance(listed, list) else set()
    allowed = [tool for tool in tools if _name_of(tool) in names]
    if not allowed or len(allowed) < len(names):
        raise InvalidArgument(
            "tool_choice: allowed_tools must name some of the tools, and no others", field="tool_choice"
        )
    return allowed


def _name_of(tool: Any) -> str:
    """Returns the name in a tool or tool choice, from the object that its type names; "" if there is none."""
    kind = tool.get("type", FUNCTION) if isinstance(tool, dict) else None
    inner = tool.get(kind) if kind in KINDS else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""


def _tool(number: int, tool: Mapping[str, Any]) -> Tool:
    """Converts the tool at index `number`; raises Unimplemented for kinds other than function and custom."""
    kind = tool.get("type", FUNCTION)
    if kind == CUSTOM:
        return _custom(number, tool)
    if kind != FUNCTION:
        raise Unimplemented(f"tools[{number}]: tools of type {kind!r} are not supported by this server", field="tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidArgument(f"tools[{number}]: function must be an object{SHAPE}", field="tools")
    fields = (function.get(name) for name in ("name", "parameters", "description", "strict"))
    return new_tool(f"tools[{number}]", *fields)


def _custom(number: int, tool: Mapping[str, Any]) -> Tool:
    """Returns a tool whose argument is one text instead of JSON, with its optional grammar; raises InvalidArgument
    for a malformed entry."""
    custom = tool.get(CUSTOM)
    if not isinstance(custom, dict):
        shape = ', as in {"type": "custom", "custom": {"name": "..."}}'
        raise InvalidArgument(f"tools[{number}]: custom must be an object{shape}", field="tools")
    format = custom.get("format")
    grammar = format.get("grammar") if isinstance(format, dict) else None
    return text_tool(f"tools[{number}]", custom.get("name"), custom.get("description"), format, grammar)
