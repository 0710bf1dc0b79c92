"""Building blocks for JSON Schemas of answers."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}
ANYTHING: Schema = {}


def object_of(**properties: Any) -> Schema:
    """Returns the schema of an object with these required properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(items: Schema) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", "items": items}
