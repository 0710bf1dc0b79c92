"""Tools of a request: what the chat template shows, and what the answer may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.services.frontend.request.request import TextInput, Tool, ToolUse
from quire.shared.errors import InvalidArgument

NONE, AUTO, REQUIRED = "none", "auto", "required"
INPUT = "input"  # the single property of tools that take a text
SYNTAXES = ("lark", "regex")


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """Tools for the template and tools that may be called; both empty without tools."""

    template_tools: Sequence[Mapping[str, Any]] = ()
    tool_use: ToolUse | None = None

    @property
    def must_call(self) -> bool:
        return self.tool_use is not None and self.tool_use.choice != AUTO


def build_tool_offer(
    tools: Sequence[Tool],
    mode: str,
    name: str,
    *,
    parallel: bool,
    template_tools: Sequence[Mapping[str, Any]] | None = None,
) -> ToolOffer:
    """Returns the tool offer of a request. `mode`: whether a tool may, must or must not be called; `name`: the function
    to call, or empty. `template_tools`: the tools in OpenAI's form, if the client sent them so. With mode NONE the
    template gets no tools either, since the model would call them regardless. Raises InvalidArgument for a name of none
    of the tools."""
    if name and name not in {tool.name for tool in tools}:
        raise InvalidArgument(f"tool_choice: {name!r} is not the name of one of the tools", field="tool_choice")
    if mode == NONE:
        return ToolOffer()
    return ToolOffer(
        [to_openai_tool(tool) for tool in tools] if template_tools is None else template_tools,
        ToolUse(tuple(tools), mode, name, parallel),
    )


def new_tool(place: str, name: Any, parameters: Any, description: Any, strict: Any = None) -> Tool:
    """Returns a validated tool. `place`: names the tool in errors. Raises InvalidArgument for a wrong type."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{place}: name must be a text that is not empty, got {name!r}", field="tools")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidArgument(f"{place}: parameters must be a JSON Schema object, got {parameters!r}", field="tools")
    if description is not None and not isinstance(description, str):
        raise InvalidArgument(f"{place}: description must be text, got {description!r}", field="tools")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidArgument(f"{place}: strict must be true or false, got {strict!r}", field="tools")
    return Tool(name, parameters or {}, description or "", bool(strict))


def text_tool(place: str, name: Any, description: Any, format: Any, grammar: Any = None) -> Tool:
    """Returns a tool that takes a text; models see a function with one string parameter. `format`: {"type": "text"} or
    {"type": "grammar"}; `grammar`: the object with the grammar. `place`: of the tool in the request, for errors. Raises
    InvalidArgument for other formats, and an invalid name, description or grammar."""
    if format is not None and not (isinstance(format, dict) and format.get("type") in ("text", "grammar")):
        raise InvalidArgument(
            f'{place}: format must be {{"type": "text"}} or one of type grammar, got {format!r:.64}', field="tools"
        )
    text_input = TextInput() if not format or format["type"] == "text" else _grammar(place, grammar)
    shape = (
        f"Text that fits this {text_input.syntax} grammar:\n{text_input.definition}"
        if text_input.syntax
        else "Any text."
    )
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": shape}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return replace(new_tool(place, name, parameters, description, bool(text_input.syntax)), text_input=text_input)


def _grammar(place: str, grammar: Any) -> TextInput:
    """Returns the text input of a grammar object with `syntax` and `definition`; the grammar itself is not parsed.
    `place`: of the tool in the request, for errors. Raises InvalidArgument for an unknown syntax and an empty
    definition."""
    fields = grammar if isinstance(grammar, dict) else {}
    syntax, definition = fields.get("syntax"), fields.get("definition")
    if syntax not in SYNTAXES:
        raise InvalidArgument(
            f"{place}: the syntax of a grammar must be {' or '.join(SYNTAXES)}, got {syntax!r:.64}", field="tools"
        )
    if not isinstance(definition, str) or not definition:
        raise InvalidArgument(
            f"{place}: the definition of a grammar must be a text that is not empty, got {definition!r:.64}",
            field="tools",
        )
    return TextInput(syntax, definition)


def to_openai_tool(tool: Tool) -> dict[str, Any]:
    """Returns the function's name, description and parameters in OpenAI's form, which chat templates read."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}
