"""Schemas of the answers of OpenAI's API and of vLLM's additions to it."""

from __future__ import annotations

from quire.services.frontend.http.document.schemas import (
    ANYTHING,
    COUNT,
    NUMBER,
    OPTIONAL_TEXT,
    TEXT,
    Schema,
    list_of,
    object_of,
)

USAGE = object_of(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
CHOICE = {"index": COUNT, "finish_reason": OPTIONAL_TEXT, "logprobs": ANYTHING}

COMPLETION = object_of(
    id=TEXT, object=TEXT, created=COUNT, model=TEXT, choices=list_of(object_of(text=TEXT, **CHOICE)), usage=USAGE
)
CHAT = object_of(
    id=TEXT,
    object=TEXT,
    created=COUNT,
    model=TEXT,
    choices=list_of(object_of(message=object_of(role=TEXT, content=OPTIONAL_TEXT), **CHOICE)),
    usage=USAGE,
)

RANKED = object_of(
    id=TEXT,
    model=TEXT,
    usage=object_of(prompt_tokens=COUNT, total_tokens=COUNT),
    results=list_of(object_of(index=COUNT, relevance_score=NUMBER)),
)


def _pooled(**entry: Schema) -> Schema:
    """Returns the schema of an answer of pooled texts whose entries of `data` have the given fields and an index."""
    return object_of(
        id=TEXT,
        object={"const": "list"},
        created=COUNT,
        model=TEXT,
        data=list_of(object_of(index=COUNT, **entry)),
        usage=object_of(prompt_tokens=COUNT, total_tokens=COUNT),
    )


VECTORS = _pooled(object=TEXT, embedding={"anyOf": [list_of(NUMBER), TEXT]})
CLASSES = _pooled(label=TEXT, probs=list_of(NUMBER), num_classes=COUNT)
SCORES = _pooled(object=TEXT, score=NUMBER)
POOLED = _pooled(object=TEXT, data={"anyOf": [list_of(NUMBER), list_of(list_of(NUMBER)), TEXT]})
RESPONSE = object_of(
    id=TEXT,
    object={"const": "response"},
    created_at=NUMBER,
    model=TEXT,
    status=TEXT,
    output=list_of(object_of(type=TEXT)),
    usage={"anyOf": [object_of(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT), {"type": "null"}]},
)
