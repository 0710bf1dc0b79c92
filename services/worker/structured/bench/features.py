"""JSON Schema keywords one at a time, with values that fulfil them and values that do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.services.worker.structured.bench.schemas import BOOLEAN, INTEGER, NUMBER, STRING, Json, items, record


@dataclass(frozen=True, slots=True)
class Feature:
    """A schema, with valid and invalid values."""

    name: str
    schema: Json
    right: tuple[Any, ...]
    wrong: tuple[Any, ...]


def string_schema(**keywords: Any) -> Json:
    return {"type": "string", **keywords}


def format_feature(name: str, right: str, wrong: str) -> Feature:
    return Feature(f"format {name}", string_schema(format=name), (right,), (wrong,))


A, B = record({"a": INTEGER}), record({"b": STRING})
OPEN = {"type": "object", "properties": {"a": INTEGER}}

FEATURES = (
    Feature("type string", STRING, ("", "a\n\u00e9\U0001f600"), (1, None)),
    Feature("type integer", INTEGER, (0, -17, 10**12), (1.5, "1")),
    Feature("type number", NUMBER, (1, -1.5, 2e-7), ("1", True)),
    Feature("type boolean, null", {"type": ["boolean", "null"]}, (True, None), (0, "null")),
    Feature("no type", {}, (1, "a", [1], {"a": None}), ()),
    Feature("enum", {"enum": [1, "a", None, [1, 2]]}, (1, "a", None, [1, 2]), (2, "b", [1])),
    Feature("const", {"const": {"a": [1]}}, ({"a": [1]},), ({"a": [2]}, 1)),
    Feature("minimum, maximum", {"type": "integer", "minimum": -5, "maximum": 105}, (-5, 105, 0), (-6, 106, 1000)),
    Feature("exclusive bounds", {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, (1, 9), (0, 10)),
    Feature("bounds of numbers", {"type": "number", "minimum": 0.5, "maximum": 2.5}, (0.5, 1.75, 2), (0.25, 2.75)),
    Feature("multipleOf", {"type": "integer", "multipleOf": 5}, (0, 15, 100), (7, 101)),
    Feature(
        "minLength, maxLength", string_schema(minLength=2, maxLength=3), ("ab", "\u00e9\u00e9\u00e9"), ("a", "abcd")
    ),
    Feature("pattern", string_schema(pattern="^[a-c]+-\\d{2}$"), ("abc-12",), ("abd-12", "a-1")),
    Feature("pattern, not anchored", string_schema(pattern="b\\d"), ("ab1c", "b2"), ("ab", "1b")),
    Feature("pattern and length", string_schema(pattern="^a+$", maxLength=3), ("aaa",), ("aaaa", "b")),
    format_feature("date", "2024-02-29", "2024-13-01"),
    format_feature("time", "10:20:30Z", "25:00:00Z"),
    format_feature("date-time", "2024-02-03T04:05:06Z", "2024-02-03 04:05"),
    format_feature("duration", "P1DT2H", "1 day"),
    format_feature("email", "ann@example.com", "ann at example"),
    format_feature("hostname", "a.example.com", "-a-"),
    format_feature("ipv4", "10.0.0.255", "10.0.0.256"),
    format_feature("ipv6", "2001:db8::1", "2001:::1"),
    format_feature("uri", "https://example.com/a?b=c", "no uri"),
    format_feature("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    Feature("items", items(INTEGER), ([], [1, 2]), (["a"], 1)),
    Feature("prefixItems", items(BOOLEAN, prefixItems=[INTEGER, STRING]), ([1, "a", True],), (["a", 1], [1, "a", 2])),
    Feature("no further items", {"type": "array", "prefixItems": [INTEGER], "items": False}, ([1],), ([1, 2],)),
    Feature("minItems, maxItems", items(INTEGER, minItems=1, maxItems=2), ([1], [1, 2]), ([], [1, 2, 3])),
    Feature("uniqueItems", items(INTEGER, uniqueItems=True), ([1, 2],), ([1, 1],)),
    Feature("contains", {"type": "array", "contains": INTEGER}, (["a", 1],), (["a"],)),
    Feature("properties, required", {**OPEN, "required": ["a"]}, ({"a": 1}, {"a": 1, "b": 2}), ({}, {"a": "x"})),
    Feature("optional properties", record({"a": INTEGER, "b": STRING}, []), ({}, {"b": "x"}), ({"c": 1}, {"a": "x"})),
    Feature("additionalProperties false", {**OPEN, "additionalProperties": False}, ({"a": 1},), ({"b": 1},)),
    Feature(
        "additionalProperties schema", {**OPEN, "additionalProperties": STRING}, ({"a": 1, "b": "x"},), ({"b": 1},)
    ),
    Feature(
        "patternProperties",
        {"type": "object", "patternProperties": {"^n_": INTEGER}, "additionalProperties": False},
        ({"n_a": 1},),
        ({"n_a": "x"}, {"m": 1}),
    ),
    Feature("propertyNames", {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, ({"ab": 1},), ({"A": 1},)),
    Feature(
        "minProperties, maxProperties", {"type": "object", "minProperties": 1, "maxProperties": 2}, ({"a": 1},), ({},)
    ),
    Feature(
        "dependentRequired",
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
        ({"a": 1, "b": 2}, {"b": 1}),
        ({"a": 1},),
    ),
    Feature("anyOf", {"anyOf": [A, B]}, ({"a": 1}, {"b": "x"}), ({"a": "x"}, {"c": 1})),
    Feature("oneOf, disjoint", {"oneOf": [A, B]}, ({"a": 1}, {"b": "x"}), ({"a": "x"},)),
    Feature("oneOf, overlapping", {"oneOf": [INTEGER, {"type": "integer", "minimum": 5}]}, (1,), (7,)),
    Feature(
        "allOf",
        {"allOf": [{**OPEN, "required": ["a"]}, {"type": "object", "properties": {"b": STRING}, "required": ["b"]}]},
        ({"a": 1, "b": "x"},),
        ({"a": 1}, {"a": 1, "b": 2}),
    ),
    Feature("not", {"type": "integer", "not": {"const": 3}}, (2,), (3,)),
    Feature("if, then, else", {"if": INTEGER, "then": {"minimum": 5}, "else": STRING}, (6, "a"), (4, [])),
    Feature("$ref", {"$ref": "#/$defs/a", "$defs": {"a": A}}, ({"a": 1},), ({"a": "x"},)),
    Feature(
        "recursive $ref",
        {"$ref": "#/$defs/l", "$defs": {"l": {"anyOf": [{"type": "null"}, record({"next": {"$ref": "#/$defs/l"}})]}}},
        (None, {"next": {"next": None}}),
        ({"next": 1},),
    ),
    Feature("$anchor", {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "integer"}}}, (1,), ("a",)),
    Feature("unevaluatedProperties", {"allOf": [OPEN], "unevaluatedProperties": False}, ({"a": 1},), ({"b": 1},)),
)
