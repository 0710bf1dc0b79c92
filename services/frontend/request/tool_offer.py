"""Tools as edges read them: what the template shows of them, and what the answer may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.services.frontend.request.request import Tool, ToolUse
from quire.shared.errors import InvalidArgument

NONE, AUTO, REQUIRED = "none", "auto", "required"


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """Both empty without tools."""

    shown: Sequence[Mapping[str, Any]] = ()
    use: ToolUse | None = None

    @property
    def must_call(self) -> bool:
        return self.use is not None and self.use.choice != AUTO


def offer(
    tools: Sequence[Tool], mode: str, name: str, *, parallel: bool, shown: Sequence[Mapping[str, Any]] | None = None
) -> ToolOffer:
    """`shown`: the tools in OpenAI's form, if the client wrote them so. With NONE they are not even shown: the model
    would call them all the same."""
    if name and name not in {tool.name for tool in tools}:
        raise InvalidArgument(f"tool_choice: {name!r} is not the name of one of the tools", field="tool_choice")
    if mode == NONE:
        return ToolOffer()
    return ToolOffer(
        [as_shown(tool) for tool in tools] if shown is None else shown, ToolUse(tuple(tools), mode, name, parallel)
    )


def new_tool(place: str, name: Any, parameters: Any, description: Any, strict: Any = None) -> Tool:
    """Checked; `place` says in an error which of them it was."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{place}: name must be a text that is not empty, got {name!r}", field="tools")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidArgument(f"{place}: parameters must be a JSON Schema object, got {parameters!r}", field="tools")
    if description is not None and not isinstance(description, str):
        raise InvalidArgument(f"{place}: description must be text, got {description!r}", field="tools")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidArgument(f"{place}: strict must be true or false, got {strict!r}", field="tools")
    return Tool(name, parameters or {}, description or "", bool(strict))


def as_shown(tool: Tool) -> dict[str, Any]:
    """OpenAI's form, which chat templates read."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}
