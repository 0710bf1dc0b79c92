"""Finds JSON Schemas that no finite value satisfies, by their structure: unbounded required recursion, contradictory
bounds, values of the wrong type."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
MAX_ROUNDS = 64  # over recursive references; a schema that needs more is not checked
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
BOUNDS = {
    "string": (("minLength", "maxLength"),),
    "array": (("minItems", "maxItems"),),
    "object": (("minProperties", "maxProperties"),),
    "number": (("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")),
}
BOUNDS["integer"] = BOUNDS["number"]
IS_TYPE = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: not isinstance(value, bool) and isinstance(value, int | float) and value == int(value),
    "number": lambda value: not isinstance(value, bool) and isinstance(value, int | float),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def contradiction(schema: Any) -> str:
    """Returns where and why no value satisfies the schema, by JSON pointer; empty if a value may."""
    finder = _Finder(schema)
    try:
        for _ in range(MAX_ROUNDS):
            reason = finder.round()
            if not reason or not finder.has_changed:
                return reason
    except RecursionError:  # thousands of chained references
        return ""
    return ""


class _Finder:
    """Computes a least fixed point: a reference counts as satisfiable once its target is, given what was known
    before."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._fulfillable: set[str] = set()  # references
        self._open: list[str] = []
        self._failed: dict[str, str] = {}
        self.has_changed = False

    def round(self) -> str:
        self._failed = {}
        self.has_changed = False
        return self._reason(self._root, "#")

    def _reason(self, node: Any, at: str) -> str:
        """Returns where and why no value satisfies `node`, a schema at the JSON pointer `at`; empty if a value may."""
        if node is False:
            return f"{at} is false"
        if not isinstance(node, dict):
            return ""
        return self._reference_reason(node, at) or self._parts_reason(node, at) or self._values_reason(node, at)

    def _reference_reason(self, node: Json, at: str) -> str:
        """Returns why the target of the node's $ref cannot be satisfied, for instance because it requires itself;
        empty if it may or there is no $ref. Records targets found satisfiable."""
        ref = node.get("$ref")
        if not isinstance(ref, str) or ref in self._fulfillable:
            return ""
        if ref in self._open:
            return f"{at} requires another {ref} inside of {ref}, without an end"
        if ref not in self._failed:
            target, found = _resolve(self._root, ref)
            if not found:
                return ""
            self._open.append(ref)
            self._failed[ref] = self._reason(target, ref)
            self._open.pop()
            if not self._failed[ref]:
                self._fulfillable.add(ref)
                self.has_changed = True
        return self._failed[ref]

    def _parts_reason(self, node: Json, at: str) -> str:
        """Returns why one part of allOf, or every part of anyOf or oneOf, cannot be satisfied; empty if they may."""
        for number, part in enumerate(_list(node, "allOf")):
            if reason := self._reason(part, f"{at}/allOf/{number}"):
                return reason
        for key in ("anyOf", "oneOf"):
            reasons = [self._reason(part, f"{at}/{key}/{number}") for number, part in enumerate(_list(node, key))]
            if reasons and all(reasons):
                return reasons[0]
        return ""

    def _values_reason(self, node: Json, at: str) -> str:
        """Returns why no listed value (enum, const), or no value of any allowed type, satisfies the node; empty if
        one may."""
        kinds = node.get("type", TYPES)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list | tuple) or not kinds or not all(kind in TYPES for kind in kinds):
            return ""
        if "enum" in node or "const" in node:
            return _listed_reason(node, kinds, at)
        reasons = [self._kind_reason(kind, node, at) for kind in kinds]
        return reasons[0] if all(reasons) else ""

    def _kind_reason(self, kind: str, node: Json, at: str) -> str:
        """Returns why no value of the JSON type `kind` satisfies the node: contradictory bounds, properties or
        items; empty if one may."""
        for least, most in BOUNDS.get(kind, ()):
            low, high = _number(node, least), _number(node, most)
            touch = low == high and "exclusive" in least + most
            if low is not None and high is not None and (low > high or touch):
                return f"{at}: {least} {low} and {most} {high} exclude each other"
        if kind == "object":
            return self._object_reason(node, at)
        return self._array_reason(node, at) if kind == "array" else ""

    def _object_reason(self, node: Json, at: str) -> str:
        """Returns why no object satisfies the node: more required names than maxProperties, a forbidden one, or one
        whose schema cannot be satisfied; empty if one may."""
        names = [name for name in _list(node, "required") if isinstance(name, str)]
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        most = _number(node, "maxProperties")
        if most is not None and most < len(set(names)):
            return f"{at}: required names {len(set(names))} properties, and maxProperties is {most:g}"
        for name in names:
            if name in properties:
                reason = self._reason(properties[name], f"{at}/properties/{_escaped(name)}")
            elif node.get("patternProperties"):
                reason = ""
            elif node.get("additionalProperties") is False:
                reason = f"{at}: required names {name!r}, which properties lacks and additionalProperties forbids"
            else:
                reason = self._reason(node.get("additionalProperties"), f"{at}/additionalProperties")
            if reason:
                return reason
        return ""

    def _array_reason(self, node: Json, at: str) -> str:
        """Returns why no array satisfies the node: an item that minItems requires has a schema that cannot be
        satisfied; empty if one may."""
        least = _number(node, "minItems") or 0
        items = node.get("items")
        key, first = ("items", items) if isinstance(items, list) else ("prefixItems", _list(node, "prefixItems"))
        for number, inner in enumerate(first):
            if number < least and (reason := self._reason(inner, f"{at}/{key}/{number}")):
                return reason
        rest = "additionalItems" if isinstance(items, list) else "items"
        return self._reason(node.get(rest), f"{at}/{rest}") if least > len(first) else ""


def _listed_reason(node: Json, kinds: list[str] | tuple[str, ...], at: str) -> str:
    """Returns why no value of enum or const is allowed: an empty list, a const outside of it, or only values of
    other types; empty if one is."""
    listed = node.get("enum", [node.get("const")])
    if not isinstance(listed, list):
        return ""
    if not listed:
        return f"{at}/enum is empty"
    if "const" in node and node["const"] not in listed:
        return f"{at}: const is not among the values of enum"
    key, left = ("const", [node["const"]]) if "const" in node else ("enum", listed)
    if not any(IS_TYPE[kind](value) for kind in kinds for value in left):
        return f"{at}/{key} holds no value of type {', '.join(kinds)}"
    return ""


def _list(node: Json, key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []


def _number(node: Json, key: str) -> float | None:
    found = node.get(key)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _resolve(root: Any, ref: str) -> tuple[Any, bool]:
    """Resolves a JSON pointer; the second value is False if it is invalid or points nowhere."""
    if ref != "#" and not ref.startswith("#/"):
        return None, False
    node = root
    for part in ref.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None, False
    return node, True
