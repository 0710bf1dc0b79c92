"""Conversion of `tools` and `tool_choice` of a body, which lack the inner object of chat completions.

Functions and custom tools are offered, those of a namespace under a joined name. Tools that a server runs itself
(web_search, image_generation, ...) and local_shell are not shown to the model: clients list them together with
functions and continue without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.services.frontend.openai_edge.body import tools as chat_tools
from quire.services.frontend.openai_edge.responses import item_schemas
from quire.services.frontend.request.tool_offer import AUTO, NONE, REQUIRED, ToolOffer
from quire.shared.errors import InvalidArgument, Unimplemented

Json = Mapping[str, Any]

INNER = ("name", "description", "parameters", "strict")
FUNCTION, CUSTOM = chat_tools.KINDS


class ClientTool(NamedTuple):
    """Client's view of a tool, which the model sees under one joined name."""

    namespace: str  # empty for tools without one
    name: str
    takes_text: bool = False


def read(tools: Sequence[Json] | None, choice: Any, *, parallel: bool) -> ToolOffer:
    """Returns the callable tools; if there are none, the list counts as empty, unless a call is required."""
    _check_choice(choice, tools or ())
    nested = [_nested(tool) for _, tool in _offered(tools or ())]
    if not nested:
        _check_call_is_possible(choice, tools or ())
        return chat_tools.read(None, None if choice in (AUTO, NONE) else choice, parallel=parallel)
    return chat_tools.read(nested, _nested_choice(choice), parallel=parallel)


def echoed_tools(tools: Sequence[Json] | None) -> list[Json]:
    """Returns the tools as a response repeats them: functions with all four fields."""
    return [
        {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}
        if tool.get("type") == "function"
        else tool
        for tool in tools or ()
    ]


def added_tools(items: Iterable[Json]) -> list[Json]:
    """Returns the tools that items of a conversation add, in order; raises InvalidArgument for an item without a
    list of tools."""
    tools: list[Json] = []
    for number, item in enumerate(items):
        if item.get("type") == item_schemas.ADDED_TOOLS:
            if not isinstance(listed := item.get("tools"), list):
                raise InvalidArgument(
                    f"input[{number}]: {item_schemas.ADDED_TOOLS} needs a list of tools", field="input"
                )
            tools += listed
    return tools


def tools_by_prompt_name(tools: Sequence[Json] | None) -> Mapping[str, ClientTool]:
    """Maps the names that the model sees, joined with their namespaces, to the client's tools."""
    return {
        name: ClientTool(space, name.removeprefix(_prefix(space)) if space else name, tool.get("type") == CUSTOM)
        for space, tool in _offered(tools or ())
        if isinstance(name := tool.get("name"), str)
    }


def name_in_prompt(name: str, namespace: Any) -> str:
    """Returns the name under which the model sees a tool."""
    return f"{_prefix(namespace)}{name}" if isinstance(namespace, str) and namespace else name


def _prefix(namespace: str) -> str:
    return namespace if namespace.endswith("_") else f"{namespace}__"


def _offered(tools: Sequence[Json]) -> Iterator[tuple[str, Json]]:
    """Yields each function and custom tool with its namespace, which may be empty."""
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        match _type_of(tool, place):
            case kind if kind in chat_tools.KINDS:
                yield "", tool
            case "namespace":
                space, inner = tool.get("name"), tool.get("tools")
                if not isinstance(space, str) or not space or not isinstance(inner, list):
                    raise InvalidArgument(f"{place}: a namespace needs a name and a list of tools", field="tools")
                for position, one in enumerate(inner):
                    if _type_of(one, f"{place}.tools[{position}]") in chat_tools.KINDS:
                        yield space, {**one, "name": name_in_prompt(_name_of(one, place), space)}


def _type_of(tool: Any, place: str) -> str:
    """Returns the tool's type; raises InvalidArgument with its place, as tools[0], if it is not a text."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or not kind:
        raise InvalidArgument(
            f"{place}: type must be the kind of a tool, as in function, got {kind!r:.64}", field="tools"
        )
    return kind


def _name_of(tool: Json, place: str) -> str:
    """Returns the tool's name; raises InvalidArgument with its place, as tools[0], if it is missing or empty."""
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{place}: name must be a text that is not empty, got {name!r:.64}", field="tools")
    return name


def _nested(tool: Json) -> dict[str, Any]:
    """Converts a tool to the form of chat completions, whose fields are in an inner object named like its type."""
    if tool["type"] == CUSTOM:
        format = tool.get("format")
        nested = {**format, "grammar": format} if isinstance(format, dict) else format
        return {
            "type": CUSTOM,
            CUSTOM: {**{name: tool.get(name) for name in ("name", "description")}, "format": nested},
        }
    inner = {name: tool[name] for name in INNER if tool.get(name) is not None}
    return {"type": "function", "function": inner}


def _check_choice(choice: Any, tools: Sequence[Json]) -> None:
    """Raises Unimplemented for a choice that forces a tool that the model cannot see."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in (None, *chat_tools.KINDS, "allowed_tools") and any(
        isinstance(tool, dict) and tool.get("type") == kind for tool in tools
    ):
        raise Unimplemented(
            f"tool_choice: tools of type {kind!r:.64} are not supported by this server; send auto", field="tool_choice"
        )


def _check_call_is_possible(choice: Any, tools: Sequence[Json]) -> None:
    """Raises Unimplemented where a call is required and the model can see no tool."""
    kinds = sorted({str(tool.get("type")) for tool in tools})
    if choice == REQUIRED and kinds:
        raise Unimplemented(
            f"tool_choice: required needs a function among the tools; tools of type {', '.join(kinds):.64} are not "
            "supported by this server; add a function, or send auto",
            field="tool_choice",
        )


def _nested_choice(choice: Any) -> Any:
    """Converts a tool_choice to the form of chat completions; values that are not recognized stay as they are, and
    are refused there."""
    if not isinstance(choice, dict):
        return choice
    if (kind := choice.get("type")) in chat_tools.KINDS:
        name = choice.get("name")
        if isinstance(name, str):
            name = name_in_prompt(name, choice.get("namespace"))
        return {"type": kind, kind: {"name": name}}
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        named = [_nested_name(tool) for tool in listed] if isinstance(listed, list) else listed
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice


def _nested_name(tool: Any) -> dict[str, Any]:
    name = tool.get("name") if isinstance(tool, dict) else None
    return {"type": "function", "function": {"name": name}}
