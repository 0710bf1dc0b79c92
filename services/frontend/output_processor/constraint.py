"""What an answer may look like that must call, or has a form of its own, or both; behind the reasoning in any case."""

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
    """Where an answer begins."""

    BEFORE_REASONING = "before"  # it may reason, or not
    IN_REASONING = "in"  # the prompt has begun it
    AFTER_REASONING = "after"  # the prompt has ended it, or the model does not reason


def to_structural_format(form: pb.StructuredOutput) -> Json | None:
    """As a part of a structural tag; None for tags in the old spelling, which nothing can be put around."""
    match form.WhichOneof("constraint"):
        case "json_schema":
            return _of_text(form.json_schema)
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


def _of_text(document: str) -> Json | None:
    try:
        return schema(json.loads(document))
    except (ValueError, RecursionError):
        return None  # refused as it is


def _inner(tag: str) -> Json | None:
    try:
        document: Any = json.loads(tag)
    except (ValueError, RecursionError):
        return None
    found = document.get("format") if isinstance(document, dict) else None
    return found if isinstance(found, dict) else None


def after_reasoning(answer: Json, reasoning: ReasoningFormat | None, place: AnswerStart) -> Json:
    if reasoning is None or place is AnswerStart.AFTER_REASONING or not reasoning.ends:
        return answer
    thoughts = (ANY_TEXT, reasoning.ends[0], reasoning.after_end, SPACE)
    if place is AnswerStart.IN_REASONING:
        return sequence(*thoughts, answer)
    return sequence(optional(sequence(reasoning.starts[0], *thoughts)), answer)


def structural_tag(answer: Json, options: pb.StructuredOutput | None) -> pb.StructuredOutput:
    """`options`: whose ways with white space and properties hold."""
    made = pb.StructuredOutput()
    if options is not None:
        made.CopyFrom(options)
        made.ClearField("constraint")
    made.structural_tag = json.dumps({"type": "structural_tag", "format": answer})
    return made
