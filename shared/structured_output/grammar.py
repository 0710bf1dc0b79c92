"""Every constraint as one grammar in Lark, in which a JSON Schema stands as `%json {...}` (llguidance's dialect)."""

from __future__ import annotations

import json
from typing import Any

from shared.pb.common.v1 import sampling_pb2 as pb
from shared.structured_output import ebnf, regex
from shared.structured_output.checks import MAX_NESTING, parse, refuse

OBJECT = {"type": "object"}
# One space, or a new line with its indentation: with whitespace of any length, a model that has nothing to say in JSON
# fills its answer with that.
WHITESPACE = r"(\x20|\r?\n[\x20\x09]{0,64})"


def lark(constraint: pb.StructuredOutput) -> str:
    """`constraint` is checked. Raises InvalidArgument for a grammar or a tag that cannot be read."""
    match constraint.WhichOneof("constraint"):
        case "json_schema":
            return f"start: {json_rule(parse(constraint.json_schema, 'json_schema', MAX_NESTING), constraint)}\n"
        case "json_object":
            return f"start: {json_rule(OBJECT, constraint)}\n"
        case "regex":
            return f"start: {regex.terminal(constraint.regex)}\n"
        case "choice":
            return f"start: {' | '.join(quoted(option) for option in constraint.choice.options)}\n"
        case "grammar":
            return ebnf.lark(constraint.grammar) if ebnf.is_ebnf(constraint.grammar) else constraint.grammar
        case kind:
            raise refuse(f"{kind} is not offered yet")


def json_rule(schema: Any, options: pb.StructuredOutput) -> str:
    """A schema inside a rule."""
    if schema is True:
        schema = {}
    if options.disable_additional_properties:
        schema = _closed(schema)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _spacing(options)}
    return f"%json {json.dumps(schema)}"


def quoted(text: str) -> str:
    """A text as a string of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _spacing(options: pb.StructuredOutput) -> dict[str, Any]:
    if options.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": options.whitespace_pattern or WHITESPACE}


def _closed(schema: Any) -> Any:
    """Objects that name properties take no others, unless they say so."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in ("enum", "const") else _closed(value) for key, value in schema.items()}
    names = schema.keys() & {"properties", "patternProperties"} or schema.get("type") == "object"
    if names and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed
