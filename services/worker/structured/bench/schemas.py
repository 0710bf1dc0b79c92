"""Typical schemas, each with a text that fulfils it."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]
STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))


def record(properties: Json, required: list[str] | None = None) -> Json:
    """Returns the schema of an object with these properties and no others; `required`: names of the mandatory ones,
    None: all."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def items(of: Json, **more: Any) -> Json:
    return {"type": "array", "items": of, **more}


ADDRESS = record({"street": STRING, "city": STRING, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}})
LINE = record({"sku": STRING, "quantity": {"type": "integer", "minimum": 1}, "price": NUMBER})
EVENT = record({
    "at": {"type": "string", "format": "date-time"},
    "kind": {"enum": ["created", "changed", "deleted", "restored", "archived"]},
    "by": {"anyOf": [STRING, {"type": "null"}]},
})  # fmt: skip
TREE: Json = {
    "$ref": "#/$defs/node",
    "$defs": {"node": record({"value": INTEGER, "children": items({"$ref": "#/$defs/node"})})},
}
SHAPE: Json = {
    "oneOf": [
        record({"kind": {"const": "circle"}, "radius": NUMBER}),
        record({"kind": {"const": "square"}, "side": NUMBER}),
        record({"kind": {"const": "polygon"}, "points": items(items(NUMBER, minItems=2, maxItems=2))}),
    ]
}
WIDE = record({f"field_{number}_{'abcdefgh'[number % 8]}": STRING for number in range(60)}, required=[])

CASES: dict[str, tuple[Json, Any]] = {
    "person": (
        record({"name": STRING, "age": {"type": "integer", "minimum": 0, "maximum": 130}, "tags": items(STRING)}),
        {"name": "Ann Lee", "age": 42, "tags": ["friend", "works in Bergen"]},
    ),
    "order": (
        record({"id": STRING, "ship_to": ADDRESS, "lines": items(LINE, minItems=1), "paid": BOOLEAN}),
        {
            "id": "A-17",
            "ship_to": {"street": "Long Street 3", "city": "Oslo", "zip": "01234"},
            "lines": [{"sku": "apples", "quantity": 3, "price": 1.25}, {"sku": "pears", "quantity": 1, "price": 4}],
            "paid": True,
        },
    ),
    "events": (
        items(EVENT),
        [
            {"at": "2025-03-04T05:06:07Z", "kind": "created", "by": "ann"},
            {"at": "2025-03-05T05:06:07Z", "kind": "archived", "by": None},
        ],
    ),
    "tree": (TREE, {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3, "children": []}]}),
    "union": (items(SHAPE), [{"kind": "circle", "radius": 2.5}, {"kind": "polygon", "points": [[1, 2], [3, 4]]}]),
    "wide": (WIDE, {"field_3_d": "three", "field_17_b": "seventeen", "field_59_d": "the last one"}),
    "any object": ({"type": "object"}, {"a": [1, {"b": None}], "c": "text of any kind"}),
    "long text": (record({"essay": {"type": "string", "minLength": 10, "maxLength": 2000}}), {"essay": "words " * 60}),
    "500 choices": (
        record({"word": {"enum": [f"choice{number:03}" for number in range(500)]}}),
        {"word": "choice321"},
    ),
}


def text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
