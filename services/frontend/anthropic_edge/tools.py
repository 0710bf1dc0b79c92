"""Conversion of `tools` and `tool_choice` of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.anthropic_edge.typed_tools import RUN_BY_CLIENT, is_run_by_server
from quire.services.frontend.request.request import Tool
from quire.services.frontend.request.tool_offer import AUTO, NONE, REQUIRED, ToolOffer, build_tool_offer, new_tool
from quire.shared.errors import InvalidArgument, Unimplemented

MODES = {"auto": AUTO, "any": REQUIRED, "tool": REQUIRED, "none": NONE}


def read(tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None) -> ToolOffer:
    """Returns the tools that the client runs; an empty list counts as no tools."""
    kind = "auto" if choice is None else choice.get("type")
    if not isinstance(kind, str) or kind not in MODES:
        raise InvalidArgument(f"tool_choice.type must be one of {', '.join(MODES)}, got {kind!r}", field="tool_choice")
    name = str(choice.get("name") or "") if choice is not None and kind == "tool" else ""
    if kind == "tool" and not name:
        raise InvalidArgument("tool_choice: type tool needs a name", field="tool_choice")
    callable_tools = [one for number, tool in enumerate(tools or ()) if (one := _tool(number, tool)) is not None]
    _check_forced(tools or (), MODES[kind], name, has_tools=bool(callable_tools))
    if not callable_tools:
        return ToolOffer()
    parallel = choice is None or not choice.get("disable_parallel_tool_use")
    return build_tool_offer(callable_tools, MODES[kind], name, parallel=parallel)


def _check_forced(tools: Sequence[Mapping[str, Any]], mode: str, name: str, *, has_tools: bool) -> None:
    """Raises an error for a choice that forces a call of a tool that the model cannot see."""
    unshown = [str(tool.get("name")) for tool in tools if is_run_by_server(str(tool.get("type") or ""))]
    if mode == REQUIRED and (name in unshown if name else unshown and not has_tools):
        raise Unimplemented(
            f"tool_choice: {name or unshown[0]!r} is run by Anthropic's servers and not available here; send "
            "tool_choice auto, or a tool of your own",
            field="tool_choice",
        )
    if mode == REQUIRED and not has_tools:
        raise InvalidArgument("tool_choice: when it is used, tools must be set", field="tool_choice")


def _tool(number: int, tool: Mapping[str, Any]) -> Tool | None:
    """Converts tool `number`; None for one that Anthropic's servers run. Typed tools that the client runs get their
    schema here; raises Unimplemented for other types."""
    kind = tool.get("type")
    if isinstance(kind, str) and is_run_by_server(kind):
        return None
    if isinstance(kind, str) and kind in RUN_BY_CLIENT:
        description, schema = RUN_BY_CLIENT[kind]
        return new_tool(f"tools[{number}]", tool.get("name"), dict(schema), description)
    if kind not in (None, "custom"):
        raise Unimplemented(
            f"tools[{number}]: tools of type {kind!r:.64} are not supported by this server; supported types with "
            f"a date: {', '.join(RUN_BY_CLIENT)}",
            field="tools",
        )
    fields = (tool.get(name) for name in ("name", "input_schema", "description", "strict"))
    return new_tool(f"tools[{number}]", *fields)
