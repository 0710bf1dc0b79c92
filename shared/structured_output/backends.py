"""Grammar backends by name, and the features each supports: a feature that a backend ignores or gets wrong is refused.

Determined with `python -m quire.services.worker.structured.bench`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output import ebnf
from quire.shared.structured_output.checks import (
    FIELD,
    MAX_NESTING,
    MAX_NESTING_OF_TAGS,
    NOT_COMPILED,
    is_unsupported_feature,
    parse,
    refuse,
)
from quire.shared.structured_output.schema_rewrite import ASSERTIONS, for_other_backends

Result = TypeVar("Result")

LLGUIDANCE = "llguidance"
XGRAMMAR = "xgrammar"
OUTLINES_CORE = "outlines-core"
LM_FORMAT_ENFORCER = "lm-format-enforcer"

STRINGS = frozenset(("minLength", "maxLength", "pattern"))
OBJECTS = frozenset(("properties", "required", "additionalProperties"))
ARRAYS = frozenset(("items", "minItems", "maxItems"))
COMMON = frozenset(("type", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "definitions"))
NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
# Inside a JSON string these could match characters that must be escaped: a quotation mark, a backslash.
NOT_PLAIN = re.compile(r'(?<!\\)\.|\[\^|\\[sSDWxup]|["/]|\\\\')
LOOK_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")
LOOK_BEHIND = re.compile(r"(?<!\\)\(\?<[=!]")
NO_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[bB1-9ZzG]|k<)")  # word boundaries, back references, other anchors
NOT_REGULAR = "does not support \\b, \\B, \\Z or back references in regular expressions"
NO_LOOK_AROUND = "does not support look-around in regular expressions"
NO_LOOK_BEHIND = "does not support look-behind in regular expressions"
NO_LARK = "does not support grammars in Lark, only in EBNF"
PLAIN_NAME = re.compile(r'[^"\\\x00-\x1f]*')
DEFINED = re.compile(r"#/(\$defs|definitions)/[^/]+")


@dataclass(frozen=True, slots=True)
class BackendSupport:
    """Features that one backend supports."""

    forms: frozenset[str]
    keywords: frozenset[str]  # of JSON Schema
    formats: frozenset[str] = frozenset()
    looks_ahead: bool = False  # look-ahead in regular expressions
    own_whitespace: bool = False
    compact: bool = True  # JSON without whitespace
    escapes: bool = False  # names and values with characters that JSON escapes
    any_enum: bool = False  # enum values of different types
    any_value: bool = False  # schemas without constraints
    any_ref: bool = False  # $ref to other places than definitions
    empty: bool = True  # maxLength and maxItems of 0
    many_arrays: bool = True  # several arrays in one anyOf


_TEXTS = ("json_schema", "json_object", "regex", "choice")
_COMMON_FORMATS = frozenset(("date", "date-time", "uuid"))
ABILITIES = {
    XGRAMMAR: BackendSupport(
        frozenset((*_TEXTS, "grammar", "structural_tag")),
        COMMON | STRINGS | OBJECTS | ARRAYS | NUMBERS
        | {"format", "prefixItems", "propertyNames", "minProperties", "maxProperties"},
        _COMMON_FORMATS | {"time", "email", "uri", "duration", "hostname", "ipv4", "ipv6"},
        escapes=True,
        any_enum=True,
        any_value=True,
        any_ref=True,
    ),
    OUTLINES_CORE: BackendSupport(
        frozenset(_TEXTS),
        COMMON | STRINGS | OBJECTS | ARRAYS | {"format"},
        _COMMON_FORMATS,  # its patterns for time, email and uri match unescaped backslashes and quotation marks
        own_whitespace=True,
        any_enum=True,
    ),
    LM_FORMAT_ENFORCER: BackendSupport(
        frozenset(_TEXTS),
        COMMON | STRINGS | OBJECTS | ARRAYS,
        looks_ahead=True,
        compact=False,
        any_value=True,
        empty=False,
        many_arrays=False,
    ),
}  # fmt: skip


def choose(
    constraint: pb.StructuredOutput, names: Sequence[str], ask: Callable[[str], Result]
) -> tuple[str, Result, str]:
    """Tries the backends in order; returns the first that supports the constraint, its answer, and why those before it
    do not.

    `constraint` has been validated. `ask` raises InvalidArgument if the backend cannot compile it; if it lacks a
    feature, the next backend is tried. Raises InvalidArgument with the reason of each backend if none can.
    """
    reasons: list[str] = []
    for name in names:
        reason = cannot(name, constraint)
        if not reason:
            try:
                return name, ask(name), "; ".join(reasons)
            except InvalidArgument as error:
                if len(names) == 1 or not is_unsupported_feature(error.message):
                    raise
                reason = "cannot compile it: " + error.message.removeprefix(f"{FIELD}: ").removeprefix(NOT_COMPILED)
        reasons.append(f"{name} {reason}")
    raise _refusal("; ".join(reasons))


def _refusal(text: str) -> InvalidArgument:
    return refuse(f"structured_output_backend: {text}")


def cannot(name: str, constraint: pb.StructuredOutput) -> str:
    """Returns the first feature of the constraint that a backend does not support; empty if it supports all."""
    if name == LLGUIDANCE:
        return ""  # reports unsupported features itself
    return next(_faults(ABILITIES[name], constraint), "")


def _faults(able: BackendSupport, constraint: pb.StructuredOutput) -> Iterator[str]:
    """Yields a text for each feature of the constraint that a backend with these abilities does not support."""
    kind = str(constraint.WhichOneof("constraint"))
    if kind not in able.forms:
        yield f"takes no {kind}"
    if constraint.whitespace_pattern and not able.own_whitespace:
        yield "takes no whitespace_pattern"
    if constraint.disable_any_whitespace and not able.compact:
        yield "takes no disable_any_whitespace"
    match kind:
        case "json_schema":
            yield from _Schema(able).faults(for_other_backends(parse(constraint.json_schema, kind, MAX_NESTING)))
        case "regex" if NO_REGULAR.search(constraint.regex):
            yield NOT_REGULAR
        case "regex" if LOOK_BEHIND.search(constraint.regex) and able.looks_ahead:
            yield NO_LOOK_BEHIND
        case "regex" if LOOK_AROUND.search(constraint.regex) and not able.looks_ahead:
            yield NO_LOOK_AROUND
        case "grammar" if not ebnf.is_ebnf(constraint.grammar):
            yield NO_LARK
        case "structural_tag":
            yield from _tag_faults(able, parse(constraint.structural_tag, kind, MAX_NESTING_OF_TAGS))


def _tag_faults(able: BackendSupport, node: Any) -> Iterator[str]:
    """Yields the unsupported features of the formats inside a structural tag."""
    rest = [node]
    while rest:
        match rest.pop():
            case {"type": "json_schema", "json_schema": schema}:
                yield from _Schema(able).faults(for_other_backends(schema))
            case {"type": "grammar", "grammar": str(text)} if not ebnf.is_ebnf(text):
                yield NO_LARK
            case {"type": "regex", "pattern": str(pattern)} if NO_REGULAR.search(pattern):
                yield NOT_REGULAR
            case {"type": "regex", "pattern": str(pattern)} if LOOK_AROUND.search(pattern):
                yield NO_LOOK_AROUND
            case {"schema": schema, **others}:
                yield from _Schema(able).faults(for_other_backends(schema))
                rest += others.values()
            case dict(inner):
                rest += inner.values()
            case list(inner):
                rest += inner


class _Schema:
    """Searches a JSON Schema for features that a backend does not support."""

    def __init__(self, able: BackendSupport) -> None:
        self._able = able

    def faults(self, schema: Any) -> Iterator[str]:
        """Yields a text for each unsupported feature of a schema and of all schemas inside it."""
        if not isinstance(schema, dict):
            if schema is not True or not self._able.any_value:
                yield f"does not support the schema {schema!r}"
            return
        said = {key: value for key, value in schema.items() if key in ASSERTIONS}
        yield from (f"does not enforce {key!r}" for key in said if key not in self._able.keywords)
        if not (self._able.any_value or said.keys() & {"type", "enum", "const", "anyOf", "oneOf", "$ref"}):
            yield "does not support schemas without a type"
        yield from self._values(said)
        yield from self._strings(said)
        yield from self._sizes(said)
        yield from self._references(said)
        yield from self._inner(said)

    def _values(self, said: dict[str, Any]) -> Iterator[str]:
        """Yields what is unsupported in enum and const: arrays and objects, mixed types, characters that JSON
        escapes."""
        values = said["enum"] if isinstance(said.get("enum"), list) else []
        if "const" in said:
            values = [*values, said["const"]]
            if not self._able.any_enum and not isinstance(said["const"], str):
                yield "supports 'const' only for strings"
        if any(isinstance(value, list | dict) for value in values):
            yield "does not support arrays or objects in 'enum' and 'const'"
        kinds = {type(value) for value in values}
        if not self._able.any_enum and kinds not in (set(), {str}, {int}, {float}):
            yield "does not support 'enum' of different types"
        if not self._able.escapes and not all(PLAIN_NAME.fullmatch(value) for value in values if type(value) is str):
            yield "does not support strings in 'enum' and 'const' that JSON escapes"

    def _strings(self, said: dict[str, Any]) -> Iterator[str]:
        """Yields what is unsupported in format and pattern, including combinations of pattern with other keywords."""
        if "format" in said and said["format"] not in self._able.formats:
            yield f"does not enforce 'format': {said['format']!r}"
        pattern = said.get("pattern")
        if not isinstance(pattern, str):
            return
        if said.keys() & {"minLength", "maxLength", "format", "enum"}:
            yield "does not enforce 'pattern' together with a length, a format or an enum"
        if not (pattern.startswith("^") and pattern.endswith("$")):
            yield "requires 'pattern' to be anchored with ^ and $"
        if NO_REGULAR.search(pattern):
            yield NOT_REGULAR
        if LOOK_AROUND.search(pattern):
            yield "does not support look-around in 'pattern'"
        if NOT_PLAIN.search(pattern):
            yield "does not support a 'pattern' that could match characters that JSON escapes"

    def _sizes(self, said: dict[str, Any]) -> Iterator[str]:
        """Yields what is unsupported in sizes: a maximum of 0, and several arrays among the alternatives of anyOf."""
        for key in ("maxLength", "maxItems"):
            if said.get(key) == 0 and not self._able.empty:
                yield f"does not enforce '{key}': 0"
        options = said.get("anyOf", said.get("oneOf"))
        if isinstance(options, list) and not self._able.many_arrays and sum(map(_may_be_array, options)) > 1:
            yield "does not support 'anyOf' with several arrays"

    def _references(self, said: dict[str, Any]) -> Iterator[str]:
        """Yields what is unsupported in $ref: other targets than definitions, and keywords next to it."""
        ref = said.get("$ref")
        if ref is None:
            return
        if not (isinstance(ref, str) and ref.startswith("#/")):
            yield f"does not support $ref: {ref!r}"
        elif not self._able.any_ref and not DEFINED.fullmatch(ref):
            yield f"supports $ref only to definitions, not {ref!r}"
        if said.keys() - {"$ref", "$defs", "definitions"}:
            yield "does not enforce keywords next to '$ref'"

    def _inner(self, said: dict[str, Any]) -> Iterator[str]:
        """Yields what is unsupported in properties and combinations, and the faults of the inner schemas."""
        names = said.get("properties")
        if isinstance(names, dict) and not self._able.escapes and not all(map(PLAIN_NAME.fullmatch, names)):
            yield "does not support names in 'properties' that JSON escapes"
        others = said.get("additionalProperties")
        if isinstance(others, dict) and names and not self._able.any_ref:
            yield "does not support 'additionalProperties' with a schema next to 'properties'"
        for key in ("anyOf", "oneOf"):
            if key in said and said.keys() - {key, "$defs", "definitions"}:
                yield f"does not enforce keywords next to '{key}'"
        for key in ("properties", "$defs", "definitions"):
            for inner in said[key].values() if isinstance(said.get(key), dict) else ():
                yield from self.faults(inner)
        for key in ("anyOf", "oneOf", "prefixItems"):
            for inner in said[key] if isinstance(said.get(key), list) else ():
                yield from self.faults(inner)
        for key in ("items", "additionalProperties", "propertyNames"):
            if isinstance(said.get(key), dict):
                yield from self.faults(said[key])


def _may_be_array(schema: Any) -> bool:
    """Returns whether a schema's type allows an array; True for a boolean schema and for one without a type or
    values."""
    if not isinstance(schema, dict):
        return True
    kinds = schema.get("type", [] if schema.keys() & {"enum", "const"} else ["array"])
    return "array" in (kinds if isinstance(kinds, list) else [kinds])
