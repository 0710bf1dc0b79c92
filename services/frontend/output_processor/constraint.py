"""Structural formats of answers that must call, or have a requested form, or both; they apply after the reasoning."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from quire.services.frontend.output_processor.parsing.call_grammar import (
    Json,
    const,
    one_of,
    optional,
    schema,
    sequence,
)
from quire.services.frontend.output_processor.parsing.formats import ReasoningFormat
from quire.shared.pb.common.v1 import sampling_pb2 as pb

SPACE = optional({"type": "regex", "pattern": r"[ \n]{1,4}"})
ANY_TEXT: Json = {"type": "any_text"}


class AnswerStart(Enum):
    """Position in the reasoning at which an answer begins."""

    BEFORE_REASONING = "before"  # the model may reason or not
    IN_REASONING = "in"  # the prompt contains its start
    AFTER_REASONING = "after"  # the prompt contains its end, or the model does not reason


def to_structural_format(form: pb.StructuredOutput) -> Json | None:
    """Returns the constraint as a part of a structural tag; None for legacy structural tags, which cannot be nested."""
    match form.WhichOneof("constraint"):
        case "json_schema":
            return _parse_schema(form.json_schema)
        case "json_object":
            return schema({"type": "object"})
        case "regex":
            return {"type": "regex", "pattern": form.regex}
        case "choice":
            return one_of(const(option) for option in form.choice.options)
        case "grammar":
            return {"type": "grammar", "grammar": form.grammar}
        case _:
            return _inner(form.structural_tag)


def _parse_schema(document: str) -> Json | None:
    """Returns the structural format of a JSON schema document; None if it is invalid, which a later check refuses."""
    try:
        return schema(json.loads(document))
    except (ValueError, RecursionError):
        return None  # refused later as invalid


def _inner(tag: str) -> Json | None:
    """Returns the format inside a structural tag document; None if it has none or is invalid."""
    try:
        document: Any = json.loads(tag)
    except (ValueError, RecursionError):
        return None
    inner = document.get("format") if isinstance(document, dict) else None
    return inner if isinstance(inner, dict) else None


def after_reasoning(answer: Json, reasoning: ReasoningFormat | None, place: AnswerStart) -> Json:
    """Returns the format `answer` preceded by reasoning: required if the prompt ends in it, optional at the answer's
    start. Formats without an end marker leave it unchanged."""
    if reasoning is None or place is AnswerStart.AFTER_REASONING or not reasoning.ends:
        return answer
    thoughts = (ANY_TEXT, reasoning.ends[0], reasoning.after_end, SPACE)
    if place is AnswerStart.IN_REASONING:
        return sequence(*thoughts, answer)
    return sequence(optional(sequence(reasoning.starts[0], *thoughts)), answer)


def structural_tag(answer: Json, options: pb.StructuredOutput | None) -> pb.StructuredOutput:
    """Builds the constraint for the format `answer`; settings for white space and properties are copied from
    `options`."""
    tag = pb.StructuredOutput()
    if options is not None:
        tag.CopyFrom(options)
        tag.ClearField("constraint")
    tag.structural_tag = json.dumps({"type": "structural_tag", "format": answer})
    return tag
