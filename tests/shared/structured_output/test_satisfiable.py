"""Unsatisfiable schemas are found by their structure; satisfiable ones are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from quire.shared.structured_output.satisfiable import contradiction


def node(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


ITSELF = {**ref("n"), "$defs": {"n": node(c=ref("n"))}}
RING = {**ref("a"), "$defs": {"a": node(b=ref("b")), "b": node(c=ref("c")), "c": node(a=ref("a"))}}
LIST = {"type": "array", "items": ref("n"), "minItems": 1}


@pytest.mark.parametrize(
    ("schema", "at", "why"),
    [
        (ITSELF, "#/$defs/n/properties/c", "without an end"),  # vllm-project/vllm#57788
        (RING, "#/$defs/c/properties/a", "without an end"),
        ({"$ref": "#"}, "#", "without an end"),
        ({**ref("n"), "$defs": {"n": node(c=LIST)}}, "#/$defs/n/properties/c/items", "without an end"),
        (
            {**ref("n"), "$defs": {"n": {"anyOf": [node(a=ref("n")), node(b=ref("n"))]}}},
            "#/$defs/n/anyOf/0/properties/a",
            "end",
        ),
        (
            {**ref("n"), "$defs": {"n": {"allOf": [{"type": "object"}, node(a=ref("n"))]}}},
            "#/$defs/n/allOf/1/properties/a",
            "end",
        ),
        (node(a={"enum": []}), "#/properties/a/enum", "is empty"),
        (node(a={"type": "string", "enum": [1, None]}), "#/properties/a/enum", "no value of type string"),
        (node(a={"type": "integer", "const": 1.5}), "#/properties/a/const", "no value of type integer"),
        (node(a={"enum": ["x"], "const": "y"}), "#/properties/a", "const is not among"),
        (node(a={"type": "integer", "minimum": 3, "maximum": 2}), "#/properties/a", "minimum 3 and maximum 2"),
        (node(a={"type": "number", "exclusiveMinimum": 2, "maximum": 2}), "#/properties/a", "exclusiveMinimum 2"),
        ({"type": "string", "minLength": 9, "maxLength": 2}, "#", "minLength 9 and maxLength 2"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "#", "minItems 2 and maxItems 1"),
        ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "#/items", "is false"),
        ({**node(a={}, b={}), "maxProperties": 1}, "#", "required names 2 properties, and maxProperties is 1"),
        ({"type": "object", "required": ["a/b"], "additionalProperties": False}, "#", "required names 'a/b'"),
        (node(**{"a/b": False}), "#/properties/a~1b", "is false"),
    ],
)
def test_nothing_fulfils_it(schema: dict[str, Any], at: str, why: str) -> None:
    reason = contradiction(schema)
    assert reason.split(" ")[0].removesuffix(":") == at
    assert why in reason


@pytest.mark.parametrize(
    "schema",
    [
        {**ref("n"), "$defs": {"n": {"type": "object", "properties": {"c": ref("n")}}}},
        {**ref("n"), "$defs": {"n": node(c={"anyOf": [ref("n"), {"type": "null"}]})}},
        {**ref("n"), "$defs": {"n": node(c={"anyOf": [{"type": "null"}, ref("n")]})}},
        {**ref("n"), "$defs": {"n": node(c={"type": "array", "items": ref("n")})}},
        {**ref("n"), "$defs": {"n": node(c={**node(d=ref("n")), "type": ["object", "null"]})}},
        {**ref("a"), "$defs": {"a": node(b=ref("b")), "b": {"oneOf": [ref("a"), {"const": 1}]}}},
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}},
        {"type": ["string", "integer"], "minLength": 3, "maxLength": 1},
        {"type": "array", "items": False},
        {"type": "integer", "enum": [1.0, "x"]},
        {"exclusiveMinimum": True, "minimum": 2, "maximum": 2, "type": "integer"},
        {"$ref": "#/nowhere"},
        {"required": ["a"], "patternProperties": {"a": {}}, "additionalProperties": False, "type": "object"},
        {**ref("d0"), "$defs": {**{f"d{i}": ref(f"d{i + 1}") for i in range(3000)}, "d3000": {}}},
        {"properties": 3, "required": 4, "enum": 5, "type": "object"},
        True,
    ],
)
def test_something_may_fulfil_it(schema: Any) -> None:
    assert contradiction(schema) == ""
