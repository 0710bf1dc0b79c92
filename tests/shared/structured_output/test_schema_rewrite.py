"""Schemas as tools and exports write them keep their meaning for llguidance; annotations never refuse a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.shared.structured_output.schema_rewrite import for_llguidance, without_annotations
from tests.shared.test_structured_output import accepts

SCORE = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["score"],
    "additionalProperties": False,
}


def takes(schema: Any, value: Any) -> bool:
    return accepts(json.dumps(value), json_schema=json.dumps(schema))


@pytest.mark.parametrize(
    "name",
    # jcode#543, OpenAPI exports, MCP servers
    ["binary", "byte", "password", "uri-reference", "int64", "decimal", "color", "regex", "json-pointer", "phone"],
)
def test_a_format_that_no_library_asserts_is_an_annotation(name: str) -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": name}}, "required": ["format"]}
    assert takes(schema, {"format": "any text"})
    assert not takes(schema, {"format": 1})


def test_a_format_that_a_library_asserts_holds() -> None:
    assert takes({"type": "string", "format": "date"}, "2024-02-29")
    assert not takes({"type": "string", "format": "date"}, "yesterday")


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # mcp-go#712, coder#17365: Go writes null for the properties of a tool that takes none
        ({"type": "object", "properties": None, "required": None}, {}, 1),
        (
            {"type": "object", "properties": {"a": {"type": "string", "enum": None, "pattern": None}}, "anyOf": None},
            {"a": "x"},
            {"a": 1},
        ),
        ({"type": "array", "items": None, "maxItems": 1, "description": None}, [1], [1, 2]),
        ({"type": None, "minimum": None, "format": None, "$defs": None, "enum": ["a"]}, "a", "b"),
        # values that are null stay
        ({"const": None}, None, 1),
        ({"enum": [None, 1], "default": None}, None, 2),
        ({"properties": {"a": {"const": None}}, "required": ["a"], "type": "object"}, {"a": None}, {"a": 1}),
    ],
)
def test_a_keyword_that_is_null_is_not_there(schema: Any, right: Any, wrong: Any) -> None:
    assert takes(schema, right)
    assert not takes(schema, wrong)


def test_values_and_names_are_no_keywords() -> None:
    schema = {
        "properties": {"format": {"const": {"format": "phone"}}, "default": {"format": "phone"}},
        "$defs": {"propertyNames": {"enum": [{"propertyNames": True}]}},
        "default": {"format": "phone"},
    }
    found = without_annotations(schema)
    assert found == {**schema, "properties": {**schema["properties"], "default": {}}}


@pytest.mark.parametrize(
    ("names", "more", "right", "wrong"),
    [
        ({"pattern": "^[a-z]$"}, {}, {"a": 1}, {"ab": 1}),  # vllm-project/vllm#30390
        ({"type": "string"}, {"additionalProperties": {"type": "integer"}}, {"a b": 1}, {"a": "x"}),  # zod's record
        ({"enum": ["a", "b"]}, {"additionalProperties": {"type": "integer"}}, {"b": 1}, {"c": 1}),
        ({"type": "string", "enum": ["a"]}, {"properties": {"a": {"type": "null"}}}, {"a": None}, {"a": 1}),
        ({"const": "a"}, {}, {"a": [1]}, {"b": 1}),
        ({"pattern": "^x-", "title": "Header"}, {"additionalProperties": {"type": "string"}}, {"x-a": ""}, {"x-a": 1}),
        (True, {}, {"a": 1}, 1),
    ],
)
def test_names_of_properties(names: Any, more: dict[str, Any], right: Any, wrong: Any) -> None:
    schema = {"type": "object", "propertyNames": names, **more}
    assert takes(schema, right)
    assert not takes(schema, wrong)


@pytest.mark.parametrize("pattern", ["^score$", "^(score)$", "^(?:score|total)$"])
def test_a_pattern_that_is_a_name_is_that_property(pattern: str) -> None:  # vllm-project/vllm#30730
    schema = {**SCORE, "patternProperties": {pattern: {"type": "integer", "multipleOf": 3}}}
    assert takes(schema, {"score": 9})
    assert not takes(schema, {"score": 8})
    assert not accepts('{"score": 9,', json_schema=json.dumps(schema))
    assert "patternProperties" not in for_llguidance(schema)


def test_other_patterns_of_names_stay() -> None:
    schema = {"type": "object", "patternProperties": {"^n_": {"type": "integer"}, "^m$": {"type": "null"}}}
    assert for_llguidance(schema) == {
        "type": "object",
        "patternProperties": {"^n_": {"type": "integer"}},
        "properties": {"m": {"type": "null"}},
    }


INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}  # as OpenAPI generators write format int64


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", **INT64}, (0, -5, 2**62, -(2**63) + 1024), (2**64, 1.5)),
        ({"type": "integer", "minimum": -(2**63)}, (-(2**62), 7), (-(2**64), "7")),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, (0, 2**62), (-1, 2**65)),
        ({"type": "number", "minimum": 0, "maximum": 2**63 - 1}, (0, 1.5, 2**62), (-1, 2**64)),
        ({"type": "number", "exclusiveMaximum": 1e20}, (-1.5, 10**18), (1e21,)),
    ],
)
def test_bounds_of_64_bits_are_kept_to(schema: dict[str, Any], right: tuple[Any, ...], wrong: tuple[Any, ...]) -> None:
    assert all(takes(schema, value) for value in right)
    assert not any(takes(schema, int(value) if value == 1e21 else value) for value in wrong)


def test_a_least_value_beyond_64_bits_is_never_widened() -> None:
    assert for_llguidance({"type": "integer", "minimum": 2**70}) == {"type": "integer", "minimum": 2**70}
