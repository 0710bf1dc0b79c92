"""What a grammar library must offer whose compiling can take any time and memory: it happens in a process of its own
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
    """Bound to a vocabulary. What is wrong with a constraint it says with any exception."""

    def compile(self, constraint: pb.StructuredOutput) -> bytes:
        """In the child."""

    def load(self, constraint: pb.StructuredOutput, compiled: bytes) -> Grammar:
        """In the worker, soon."""

    def filler(self) -> MaskFiller: ...


OpenGrammarLibrary = Callable[[ModelVocabulary], GrammarLibrary]


def schema_of(constraint: pb.StructuredOutput) -> Any:
    """Of a constraint that asks for JSON."""
    if constraint.WhichOneof("constraint") == "json_object":
        return OBJECT
    schema = parse(constraint.json_schema, "json_schema", MAX_NESTING)
    schema = {} if schema is True else for_other_backends(schema)
    return closed(schema) if constraint.disable_additional_properties else schema


def schema_text(constraint: pb.StructuredOutput) -> str:
    return json.dumps(schema_of(constraint), ensure_ascii=False)


def rewrite_subschemas(schema: Any, rewrite: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Each schema in it, itself included, from inside outwards."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(found.get(key), dict):
            found[key] = {name: rewrite_subschemas(inner, rewrite) for name, inner in found[key].items()}
    for key in ("anyOf", "oneOf"):
        if isinstance(found.get(key), list):
            found[key] = [rewrite_subschemas(inner, rewrite) for inner in found[key]]
    for key in ("items", "additionalProperties"):
        if isinstance(found.get(key), dict):
            found[key] = rewrite_subschemas(found[key], rewrite)
    return rewrite(found)


class MaskingMatcher(Matcher, Protocol):
    """Writes its own mask."""

    def fill(self, mask: I32) -> None: ...


class SequentialFiller:
    """Masks in the caller's thread."""

    def accept(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[bool]:
        return [matcher.accept([token_id]) == 1 for matcher, token_id in zip(matchers, token_ids, strict=True)]

    def fill(self, matchers: Sequence[Any], places: Sequence[int], masks: I32) -> None:
        for matcher, place in zip(matchers, places, strict=True):
            matcher.fill(masks[place])
