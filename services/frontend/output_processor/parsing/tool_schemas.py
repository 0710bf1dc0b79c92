"""Schemas of a request's tools, as far as formats need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.services.frontend.request.request import Tool

DEEPEST_REFERENCE = 16
ANYTHING = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
BRANCHES = ("anyOf", "oneOf", "allOf")
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """Subschema of a tool's schema, with the root that its references resolve against."""

    schema: Any
    root: Mapping[str, Any]

    @property
    def types(self) -> frozenset[str]:
        """Returns the JSON types that a value may have; all types where the schema does not restrict them."""
        return _types(self.schema, self.root, 0) or ANYTHING

    def inner(self, name: str) -> SchemaPart:
        """Returns the schema of an object's member, else that of a list's items or other members; empty if none is
        declared."""
        for schema in _alternatives(self.schema, self.root, 0):
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return SchemaPart(properties[name], self.root)
        for schema in _alternatives(self.schema, self.root, 0):
            for keyword in ("items", "additionalProperties"):
                if isinstance(subschema := schema.get(keyword), Mapping):
                    return SchemaPart(subschema, self.root)
        return SchemaPart({}, self.root)


class ToolSchemas:
    """Names of the offered tools and JSON types of their parameters."""

    def __init__(self, tools: tuple[Tool, ...] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def without_namespace(self, name: str) -> str:
        """Returns the name of an offered tool that follows the last dot of another name, else the name itself."""
        last = name.rpartition(".")[2]
        return last if name not in self and last in self else name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def parameters(self, tool: str) -> list[str]:
        """Returns the names of the tool's parameters in the order of the schema."""
        schema = self._tools.get(tool)
        properties = schema.parameters.get("properties") if schema is not None else None
        return list(properties) if isinstance(properties, Mapping) else []

    def declares(self, tool: str, parameter: str) -> bool:
        return parameter in self.parameters(tool)

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """Returns the JSON types that the parameter may have; all types where the schema does not restrict them."""
        return self.part(tool, parameter).types

    def part(self, tool: str, parameter: str) -> SchemaPart:
        """Returns the schema of one parameter with its tool's root, in which references resolve; an unknown tool or
        parameter gives an empty one."""
        offered = self._tools.get(tool)
        root = offered.parameters if offered is not None else {}
        properties = root.get("properties")
        return SchemaPart(properties.get(parameter) if isinstance(properties, Mapping) else None, root)


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yields the schemas that apply to a value: this one, the one that it refers to, and its branches."""
    if not isinstance(schema, Mapping) or depth > DEEPEST_REFERENCE:
        return
    yield schema
    if isinstance(schema.get("$ref"), str):
        yield from _alternatives(_referenced(schema["$ref"], root), root, depth + 1)
    for keyword in BRANCHES:
        if isinstance(branches := schema.get(keyword), list):
            for branch in branches:
                yield from _alternatives(branch, root, depth + 1)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Returns the declared JSON types, also from references, enums and branches; empty if the schema does not
    restrict them or references nest too deep."""
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
    return _branch_types(schema, root, depth)


def _branch_types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Returns the union of the types of anyOf, oneOf and the like, any type if a branch declares none; empty without
    branches."""
    for keyword in BRANCHES:
        if isinstance(branches := schema.get(keyword), list):
            return frozenset().union(*(_types(branch, root, depth + 1) or ANYTHING for branch in branches))
    return frozenset()


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the schema that a chain of local references ends with; the schema itself if it is no reference."""
    for _ in range(DEEPEST_REFERENCE):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = _referenced(schema["$ref"], root)
    return schema


def _referenced(pointer: str, root: Any) -> Any:
    """Resolves a local reference such as "#/$defs/name"."""
    for part in pointer.removeprefix("#").strip("/").split("/"):
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
