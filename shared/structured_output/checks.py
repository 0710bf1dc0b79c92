"""Validation of constraints without compiling them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from quire.shared import strict_json
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output.satisfiable import contradiction

FIELD = "structured_output"
POSITION = re.compile(r"^at \d+\(\d+\): ")  # position in the generated grammar
GRAMMAR_LINES = re.compile(r"\n\s*\d+ \| .*|\n<non-verbose/>.*| <non-verbose/>.*", re.DOTALL)  # quoted grammar
DEAD_END = "NoExtension"  # llguidance: no token may follow, and the text may not end
NOT_OFFERED = re.compile(r"Unimplemented keys|look-?around|look-ahead|not supported|backreferences", re.IGNORECASE)
MAX_REASON_CHARACTERS = 500
NOT_COMPILED = "it cannot be compiled: "
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_BYTES = 128 * 1024  # of a constraint; compiled it can take 100 MB
MAX_NESTING = 64
MAX_NESTING_OF_TAGS = MAX_NESTING + 16  # brackets around the schemas inside
# multipleOf is compiled to an automaton with one state per remainder: 10,000 take 20 ms and 3 MB, a million
# 4 s and 290 MB.
MAX_MULTIPLE = 10_000


def refuse(text: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD}: {text}", field=FIELD)


def compile_refusal(reason: str) -> InvalidArgument:
    """Returns the error for a constraint that a grammar library cannot compile, without the constraint's own text."""
    return refuse(NOT_COMPILED + without_grammar(reason))


def without_grammar(reason: str) -> str:
    """Returns a library's message in one line, without the grammar that it quotes."""
    text = POSITION.sub("", " ".join(GRAMMAR_LINES.sub("", reason).split()))
    return "no text satisfies it" if text.startswith(DEAD_END) else text[:MAX_REASON_CHARACTERS]


def is_unsupported_feature(reason: str) -> bool:
    """Whether a library reports that it lacks a feature, which another backend may support."""
    return NOT_OFFERED.search(reason) is not None


def check(constraint: pb.StructuredOutput) -> None:
    """Validates a constraint without compiling it: kind, size, nesting, and for a JSON Schema whether a value can
    satisfy it. Raises InvalidArgument."""
    kind = check_size(constraint)
    if constraint.disable_any_whitespace and constraint.whitespace_pattern:
        raise refuse("whitespace_pattern and disable_any_whitespace cannot be combined; send one of them")
    _CHECKS[kind](constraint)


def check_size(constraint: pb.StructuredOutput) -> str:
    """Returns the kind of a constraint, one of KINDS, after checking its size without parsing it. Raises
    InvalidArgument if none is set or it exceeds MAX_BYTES."""
    kind: str | None = constraint.WhichOneof("constraint")
    if kind is None:
        raise refuse(f"exactly one of {', '.join(KINDS)} must be set")
    length = constraint.ByteSize()
    if length > MAX_BYTES:
        raise refuse(f"{kind} has {length} bytes; at most {MAX_BYTES} are accepted")
    return kind


def _check_json_schema(constraint: pb.StructuredOutput) -> None:
    check_schema(parse(constraint.json_schema, "json_schema", MAX_NESTING))


def _check_json_object(constraint: pb.StructuredOutput) -> None:
    if not constraint.json_object:
        raise refuse("json_object must be true, or left out")


def _check_regex(constraint: pb.StructuredOutput) -> None:
    _check_text(constraint.regex, "regex")


def _check_choice(constraint: pb.StructuredOutput) -> None:
    """Raises InvalidArgument for a choice without options or with an empty one."""
    options = constraint.choice.options
    if not options:
        raise refuse("choice must have at least one option")
    if not all(options):
        raise refuse("choice cannot contain an empty string")


def _check_grammar(constraint: pb.StructuredOutput) -> None:
    _check_text(constraint.grammar, "grammar")


def _check_structural_tag(constraint: pb.StructuredOutput) -> None:
    tags = parse(constraint.structural_tag, "structural_tag", MAX_NESTING_OF_TAGS)
    if not isinstance(tags, dict):
        raise refuse(f"structural_tag must be a JSON object, got {type(tags).__name__}")


_CHECKS: dict[str, Callable[[pb.StructuredOutput], None]] = {
    "json_schema": _check_json_schema,
    "json_object": _check_json_object,
    "regex": _check_regex,
    "choice": _check_choice,
    "grammar": _check_grammar,
    "structural_tag": _check_structural_tag,
}


def _check_text(text: str, kind: str) -> None:
    """Raises InvalidArgument for a blank text and for one with a NUL character; `kind` names it in the error."""
    if not text.strip():
        raise refuse(f"{kind} cannot be empty")
    if "\0" in text:
        raise refuse(f"{kind} contains a NUL character")


def parse(text: str, kind: str, max_nesting: int) -> Any:
    """Parses strict JSON after limiting its nesting depth, so that the parser cannot exhaust the stack. Raises
    InvalidArgument; `kind` names the text in it."""
    if not text.strip():
        raise refuse(f"{kind} cannot be empty")
    nesting = _nesting(text)
    if nesting > max_nesting:
        raise refuse(f"{kind} is nested {nesting} levels deep; at most {max_nesting} are accepted")
    try:
        return strict_json.read(text)
    except ValueError as error:
        raise refuse(f"{kind} is not valid JSON: {error}") from None


def check_schema(schema: Any) -> None:
    """Raises InvalidArgument for a schema that is valid JSON but cannot be used: it is no object or boolean, no
    value satisfies it, or its multipleOf values have too large a common multiple."""
    if not isinstance(schema, dict | bool):
        raise refuse(f"json_schema must be an object or a boolean, got {type(schema).__name__}")
    reason = contradiction(schema)
    if reason:
        raise refuse(f"no text satisfies it: {reason}")
    multiples = {_whole(value) for value in values_of(schema, "multipleOf")}
    product = math.lcm(*multiples) if multiples else 1
    if product > MAX_MULTIPLE:
        raise refuse(f"multipleOf: the least common multiple of all is {product}; at most {MAX_MULTIPLE} is supported")


def _nesting(text: str) -> int:
    """Returns the nesting depth of brackets and braces outside of strings."""
    depth = deepest = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "}]":
            depth -= 1
    return deepest


def values_of(schema: Any, key: str) -> Iterator[Any]:
    """Yields the values of `key` in all nested objects, whatever their meaning."""
    rest = [schema]
    while rest:
        node = rest.pop()
        if isinstance(node, dict):
            if key in node:
                yield node[key]
            rest.extend(node.values())
        elif isinstance(node, list):
            rest.extend(node)


def _whole(value: Any) -> int:
    """Returns a multipleOf as an integer, whose size check_schema() limits: 12 gives 12, 0.25 gives 25, without the
    decimal point. Returns 1 for an invalid one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return 1
    try:
        digits = Decimal(str(value)).normalize().as_tuple()
    except InvalidOperation:
        return 1
    whole = int("".join(map(str, digits.digits)))
    return whole * 10 ** max(0, int(digits.exponent)) if isinstance(value, int) else whole
