"""`tools` and `tool_choice` of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.request.request import Tool
from services.frontend.request.tool_offer import AUTO, NONE, REQUIRED, ToolOffer, new_tool, offer
from shared.errors import InvalidArgument, Unimplemented

MODES = {"auto": AUTO, "any": REQUIRED, "tool": REQUIRED, "none": NONE}


def read(tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None) -> ToolOffer:
    """An empty list of tools is none."""
    kind = "auto" if choice is None else choice.get("type")
    if not isinstance(kind, str) or kind not in MODES:
        raise InvalidArgument(f"tool_choice.type must be one of {', '.join(MODES)}, got {kind!r}", field="tool_choice")
    name = str(choice.get("name") or "") if choice is not None and kind == "tool" else ""
    if kind == "tool" and not name:
        raise InvalidArgument("tool_choice: type tool needs a name", field="tool_choice")
    if not tools:
        if MODES[kind] == REQUIRED:
            raise InvalidArgument("tool_choice: when it is used, tools must be set", field="tool_choice")
        return ToolOffer()
    parallel = choice is None or not choice.get("disable_parallel_tool_use")
    return offer([_tool(number, tool) for number, tool in enumerate(tools)], MODES[kind], name, parallel=parallel)


def _tool(number: int, tool: Mapping[str, Any]) -> Tool:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise Unimplemented(f"tools[{number}]: tools of type {kind!r} are not offered by this server", field="tools")
    fields = (tool.get(name) for name in ("name", "input_schema", "description", "strict"))
    return new_tool(f"tools[{number}]", *fields)
