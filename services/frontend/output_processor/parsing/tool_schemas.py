"""The tools of a request, as far as formats need to know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request.request import Tool

DEEPEST_REFERENCE = 16
ANYTHING = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class ToolSchemas:
    """Names, and JSON types of parameters."""

    def __init__(self, tools: tuple[Tool, ...] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def parameters(self, tool: str) -> list[str]:
        """Their names, in the order of the schema."""
        found = self._tools.get(tool)
        properties = found.parameters.get("properties") if found is not None else None
        return list(properties) if isinstance(properties, Mapping) else []

    def declares(self, tool: str, parameter: str) -> bool:
        return parameter in self.parameters(tool)

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types that the parameter may have; all of them where nothing says."""
        found = self._tools.get(tool)
        root = found.parameters if found is not None else {}
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _types(schema, root, 0) or ANYTHING


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Empty where the schema does not say."""
    if not isinstance(schema, Mapping) or depth > DEEPEST_REFERENCE:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return _types(_referenced(schema["$ref"], root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        nullable = {"null"} if schema.get("nullable") is True else set()  # OpenAPI 3.0
        return frozenset({declared} & ANYTHING | nullable)
    if isinstance(declared, list):
        return frozenset(name for name in declared if name in ANYTHING)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return frozenset(_JSON_TYPES.get(type(value), "object") for value in values)
    return _of_branches(schema, root, depth)


def _of_branches(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> frozenset[str]:
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(keyword), list):
            return frozenset().union(*(_types(branch, root, depth + 1) or ANYTHING for branch in branches))
    return frozenset()


def _referenced(pointer: str, root: Any) -> Any:
    """A local reference, "#/$defs/name"."""
    for part in pointer.removeprefix("#").strip("/").split("/"):
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
