"""Embeds a JSON Schema in a rule: `%json {...}` in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from typing import Any

from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output.schema_rewrite import for_llguidance

# One space, or a line break with indentation: with unlimited whitespace, a model that fails to produce JSON
# fills its answer with whitespace.
WHITESPACE = r"(\x20|\r?\n[\x20\x09]{0,64})"


def json_rule(schema: Any, options: pb.StructuredOutput) -> str:
    """Returns a rule's body for a schema, rewritten for llguidance, with the request's options on whitespace and
    additional properties."""
    if schema is True:
        schema = {}
    if options.disable_additional_properties:
        schema = closed(schema)
    schema = for_llguidance(schema)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _spacing(options)}
    return f"%json {json.dumps(schema)}"


def _spacing(options: pb.StructuredOutput) -> dict[str, Any]:
    """Returns the whitespace options, and oneOf treated as anyOf: one of its schemas holds, whether or not others
    do, too."""
    if options.disable_any_whitespace:
        return {"whitespace_flexible": False, "coerce_one_of": True}
    return {"coerce_one_of": True, "whitespace_pattern": options.whitespace_pattern or WHITESPACE}


def closed(schema: Any) -> Any:
    """Returns the schema, and all inside it, with properties forbidden that it does not name, unless it sets
    additionalProperties itself."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    narrowed = {key: value if key in ("enum", "const") else closed(value) for key, value in schema.items()}
    names = schema.keys() & {"properties", "patternProperties"} or schema.get("type") == "object"
    if names and "additionalProperties" not in schema:
        narrowed["additionalProperties"] = False
    return narrowed
