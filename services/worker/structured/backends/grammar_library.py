"""Interface of a grammar library whose compilation has no bounds on time and memory and runs in a subprocess
(compile_child.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.services.worker.structured.backends.vocabulary import ModelVocabulary
from quire.services.worker.structured.port import Grammar, MaskFiller, Matcher
from quire.shared.columns import I32
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output.checks import MAX_NESTING, parse
from quire.shared.structured_output.json_rule import closed
from quire.shared.structured_output.schema_rewrite import for_other_backends

OBJECT = {"type": "object"}


class GrammarLibrary(Protocol):
    """Library bound to a vocabulary; reports an invalid constraint by any exception."""

    def compile(self, constraint: pb.StructuredOutput) -> bytes:
        """Compiles and serializes a constraint, in the subprocess."""

    def load(self, constraint: pb.StructuredOutput, compiled: bytes) -> Grammar:
        """Deserializes a compiled constraint quickly, in the worker."""

    def filler(self) -> MaskFiller: ...


OpenGrammarLibrary = Callable[[ModelVocabulary], GrammarLibrary]


def schema_of(constraint: pb.StructuredOutput) -> Any:
    """Returns the JSON schema of a constraint that asks for JSON, parsed and adapted for libraries other than
    llguidance; json_object becomes any object. Raises InvalidArgument for invalid JSON or nesting that is too deep."""
    if constraint.WhichOneof("constraint") == "json_object":
        return OBJECT
    schema = parse(constraint.json_schema, "json_schema", MAX_NESTING)
    schema = {} if schema is True else for_other_backends(schema)
    return closed(schema) if constraint.disable_additional_properties else schema


def schema_text(constraint: pb.StructuredOutput) -> str:
    return json.dumps(schema_of(constraint), ensure_ascii=False)


def rewrite_subschemas(schema: Any, rewrite: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Returns a copy of a schema with `rewrite` applied to it and its subschemas (properties, definitions, anyOf,
    oneOf, items, additionalProperties), innermost first."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(result.get(key), dict):
            result[key] = {name: rewrite_subschemas(inner, rewrite) for name, inner in result[key].items()}
    for key in ("anyOf", "oneOf"):
        if isinstance(result.get(key), list):
            result[key] = [rewrite_subschemas(inner, rewrite) for inner in result[key]]
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), dict):
            result[key] = rewrite_subschemas(result[key], rewrite)
    return rewrite(result)


class MaskingMatcher(Matcher, Protocol):
    """Matcher that writes its own mask."""

    def fill(self, mask: I32) -> None: ...


class SequentialFiller:
    """Mask filler that calls matchers one after the other in the caller's thread."""

    def accept(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[bool]:
        return [matcher.accept([token_id]) == 1 for matcher, token_id in zip(matchers, token_ids, strict=True)]

    def fill(self, matchers: Sequence[Any], places: Sequence[int], masks: I32) -> None:
        for matcher, place in zip(matchers, places, strict=True):
            matcher.fill(masks[place])
