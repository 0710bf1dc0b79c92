"""Rewrites a JSON Schema into an equivalent one that more grammar libraries can compile.

JSON Schema 2020-12, 7.2.1: `format` is an annotation unless an implementation asserts it. Formats that no library
here asserts are removed, like other annotations. So are keywords that are null, which only `const` may be:
serializers of Go and C# write null for unset fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from quire.shared.structured_output.look_around import plain_patterns

Json = dict[str, Any]

FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)  # that at least one library asserts
# All keywords that can make a value invalid; the others are annotations.
ASSERTIONS = frozenset((
    "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength",
    "minLength", "pattern", "format", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains",
    "maxItems", "minItems", "uniqueItems", "maxContains", "minContains", "maxProperties", "minProperties", "required",
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "if", "then", "else", "allOf", "anyOf", "oneOf", "not",
    "$ref", "$dynamicRef", "$recursiveRef", "$defs", "definitions",
))  # fmt: skip
NEVER_NULL = ASSERTIONS - {"const"}  # null means unset
MAX_BOUND = 2**63 - 1024  # the largest float below 2**63
WIDE_BOUNDS = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}
HOLD_VALUES = frozenset(("enum", "const", "default", "example", "examples"))
HOLD_NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
EXACT_NAMES = re.compile(r"\^(?:\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\)|([\w-]+))\$")


def rewritten(node: Any, rewrite: Callable[[Json], Json], *, names: bool = False) -> Any:
    """Applies `rewrite` to every schema inside `node`, innermost first. `names`: the keys of `node` are names."""
    if isinstance(node, list):
        return [rewritten(item, rewrite) for item in node]
    if not isinstance(node, dict):
        return node
    if names:
        return {name: rewritten(inner, rewrite) for name, inner in node.items()}
    inside = {
        key: value if key in HOLD_VALUES else rewritten(value, rewrite, names=key in HOLD_NAMES)
        for key, value in node.items()
    }
    return rewrite(inside)


def without_annotations(schema: Any) -> Any:
    """Removes formats that no library asserts, trivial propertyNames, and keywords that are null."""
    return rewritten(schema, _without_annotations)


def _without_annotations(schema: Json) -> Json:
    """Returns one schema without formats that no library asserts, trivial propertyNames, and keywords that are null."""
    found = {key: value for key, value in schema.items() if value is not None or key not in NEVER_NULL}
    if isinstance(found.get("format"), str) and found["format"] not in FORMATS:
        del found["format"]
    names = found.get("propertyNames")
    if names is True or (isinstance(names, dict) and _said(names) in ({}, {"type": "string"})):
        del found["propertyNames"]
    return found


def for_other_backends(schema: Any) -> Any:
    """Returns the schema for backends other than llguidance: without annotations, and with every required name among
    the properties, where these backends expect it."""
    return rewritten(schema, lambda inner: _with_required_names(_without_annotations(inner)))


def _with_required_names(schema: Json) -> Json:
    """Returns the schema with required names added to its properties, under the schema of additionalProperties;
    unchanged if these are forbidden."""
    properties, required = schema.get("properties", {}), schema.get("required")
    others = schema.get("additionalProperties", True)
    if not isinstance(required, list) or not isinstance(properties, dict) or others is False:
        return schema
    missing = [name for name in required if isinstance(name, str) and name not in properties]
    added = {name: others if isinstance(others, dict) else {} for name in missing}
    return {**schema, "properties": {**properties, **added}} if added else schema


def _said(schema: Json) -> Json:
    return {key: value for key, value in schema.items() if key in ASSERTIONS}


def for_llguidance(schema: Any) -> Any:
    """Rewrites propertyNames, exact patternProperties and look-around in patterns with features that llguidance has."""
    return rewritten(schema, _for_llguidance)


def _for_llguidance(schema: Json) -> Json:
    return _with_small_bounds(_with_plain_patterns(_with_exact_names(_with_names(_without_annotations(schema)))))


def _with_small_bounds(schema: Json) -> Json:
    """Narrows bounds that exceed what the library can compile; those of int64, which OpenAPI generators write,
    change by at most 1,024."""
    found = dict(schema)
    for key, sign in WIDE_BOUNDS.items():
        bound = found.get(key)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and sign * bound > MAX_BOUND:
            found[key] = sign * MAX_BOUND
    return found


def _with_plain_patterns(schema: Json) -> Json:
    """Replaces look-around in the schema's pattern by plain patterns, further ones in allOf. Raises InvalidArgument
    if that is impossible."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return schema
    *others, last = plain_patterns(pattern)
    if not others:
        return {**schema, "pattern": last}
    return {**schema, "pattern": last, "allOf": [*schema.get("allOf", []), *({"pattern": each} for each in others)]}


def _with_names(schema: Json) -> Json:
    """Replaces propertyNames that only lists names (enum, const) by properties, and one that only has a pattern, in
    a schema without properties, by patternProperties; returns other schemas unchanged."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or "patternProperties" in schema:
        return schema
    said = {key: value for key, value in _said(names).items() if (key, value) != ("type", "string")}
    found = {key: value for key, value in schema.items() if key != "propertyNames"}
    match said:
        case {"enum": [*listed], **others} if not others and all(isinstance(name, str) for name in listed):
            return _only_these(found, listed)
        case {"const": str(name), **others} if not others:
            return _only_these(found, [name])
        case {"pattern": str(pattern), **others} if not others and "properties" not in schema:
            others_schema = found.get("additionalProperties", True)
            return {**found, "patternProperties": {pattern: others_schema}, "additionalProperties": False}
    return schema


def _only_these(schema: Json, names: list[str]) -> Json:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    properties = {name: known.get(name, others) for name in names}
    return {**schema, "properties": properties, "additionalProperties": False}


def _with_exact_names(schema: Json) -> Json:
    """Converts `^name$` to a property: next to a property of that name, the library would look for more names that
    match, and end the text if there is none."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return schema
    properties, rest = dict(schema.get("properties", {})), dict[str, Any]()
    for pattern, inner in patterns.items():
        exact = EXACT_NAMES.fullmatch(pattern)
        if exact is None:
            rest[pattern] = inner
            continue
        for name in (exact[1] or exact[2]).split("|"):
            properties[name] = {"allOf": [properties[name], inner]} if name in properties else inner
    found = {key: value for key, value in schema.items() if key != "patternProperties"}
    found["properties"] = properties
    return {**found, "patternProperties": rest} if rest else found
