"""The OpenAPI document: what FastAPI finds, and what it cannot: every status that is sent, and the shape of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from quire.services.frontend.http.answer import EVENTS
from quire.services.frontend.http.body import BYTES
from quire.services.frontend.http.fields import ranges
from quire.services.frontend.http.router import built

Schema = dict[str, Any]

LENIENT = (
    "Numbers and booleans may stand in bodies as text, booleans in place of numbers, and 0 and 1 in place of booleans; "
    "token ids of prompts have no fraction, not even .0; an empty text is taken where the tokenizer puts tokens around "
    "it. What depends on the model or on settings is not said here: its context, its vocabulary, whether it generates, "
    "embeds or classifies, and whether requests have priorities; nor that ids and tenants are printable characters."
)
UNSENT = "422"  # FastAPI's own word for a body of the wrong shape: it is 400 here
HTTP_METHODS = ("get", "post", "delete")

STATUSES: Mapping[str, str] = {
    "400": "The call is wrong, and would be wrong again; or asks for what is not offered",
    "401": "No API key, or not a good one",
    "403": "The API key is not for this",
    "404": "No such model, response or path",
    "405": "No such method here",
    "408": "The call came too slowly",
    "409": "Something that is there is in the way: an id in use, a stream of the other port",
    "413": "The body is too large",
    "415": "The body's encoding (Content-Encoding) is not one of those that are accepted",
    "429": "Full, or over the key's rate; Retry-After says when to come back",
    "431": "The headers are too large",
    "500": "A fault of the server",
    "503": "Nobody can serve this now; Retry-After says when to come back",
    "504": "The deadline passed",
}


def _object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


TEXT, COUNT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}
BOOLEAN = {"type": "boolean"}
MAYBE_TEXT = {"type": ["string", "null"]}
ANYTHING: Schema = {}
OPENAI_ERROR = _object(
    error=_object(message=TEXT, type=TEXT, param=MAYBE_TEXT, code={"type": ["integer", "string", "null"]})
)
ANTHROPIC_ERROR = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT))
OLLAMA_ERROR = _object(error=TEXT)
USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
CHOICE = {"index": COUNT, "finish_reason": MAYBE_TEXT, "logprobs": ANYTHING}

COMPLETION = _object(
    id=TEXT, object=TEXT, created=COUNT, model=TEXT, choices=_list(_object(text=TEXT, **CHOICE)), usage=USAGE
)
CHAT = _object(
    id=TEXT,
    object=TEXT,
    created=COUNT,
    model=TEXT,
    choices=_list(_object(message=_object(role=TEXT, content=MAYBE_TEXT), **CHOICE)),
    usage=USAGE,
)

RANKED = _object(
    id=TEXT,
    model=TEXT,
    usage=_object(prompt_tokens=COUNT, total_tokens=COUNT),
    results=_list(_object(index=COUNT, relevance_score=NUMBER)),
)

EMBEDDED = _object(
    id=TEXT,
    response_type=TEXT,
    embeddings={"type": ["object", "array"]},
    texts=_list(TEXT),
    meta=_object(billed_units=_object(input_tokens=COUNT)),
)

GENERATED = _object(
    text=TEXT, output_ids=_list(COUNT), meta_info=_object(id=TEXT, prompt_tokens=COUNT, completion_tokens=COUNT)
)


def _pooled(**entry: Schema) -> Schema:
    return _object(
        id=TEXT,
        object={"const": "list"},
        created=COUNT,
        model=TEXT,
        data=_list(_object(index=COUNT, **entry)),
        usage=_object(prompt_tokens=COUNT, total_tokens=COUNT),
    )


VECTORS = _pooled(object=TEXT, embedding={"anyOf": [_list(NUMBER), TEXT]})
CLASSES = _pooled(label=TEXT, probs=_list(NUMBER), num_classes=COUNT)
SCORES = _pooled(object=TEXT, score=NUMBER)

VERSIONS = ("", "/versions/{version}")
_TEXT_OUTPUT = _object(model_name=TEXT, model_version=TEXT, text_output={"anyOf": [TEXT, _list(TEXT)]})
OF_MODELS: Mapping[str, Schema] = {
    "infer": _object(
        model_name=TEXT,
        model_version=TEXT,
        outputs=_list(_object(name=TEXT, datatype=TEXT, shape=_list(COUNT), data=_list(ANYTHING))),
    ),
    "generate": _TEXT_OUTPUT,
    "generate_stream": _TEXT_OUTPUT,
}

# What a call is answered with in one piece; with `stream`, server-sent events.
ANSWERS: Mapping[str, Schema] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": CHAT,
    "/v1/embeddings": VECTORS,
    "/pooling": _pooled(object=TEXT, data={"anyOf": [_list(NUMBER), _list(_list(NUMBER)), TEXT]}),
    "/classify": CLASSES,
    "/score": SCORES,
    "/v1/score": SCORES,
    "/rerank": RANKED,
    "/v1/rerank": RANKED,
    "/v2/rerank": RANKED,
    "/v1/embed": EMBEDDED,
    "/v2/embed": EMBEDDED,
    "/invocations": {"anyOf": [CHAT, COMPLETION, VECTORS, CLASSES, SCORES, RANKED]},
    "/v1/responses": _object(
        id=TEXT,
        object={"const": "response"},
        created_at=NUMBER,
        model=TEXT,
        status=TEXT,
        output=_list(_object(type=TEXT)),
        usage={"anyOf": [_object(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT), {"type": "null"}]},
    ),
    "/v1/messages": _object(
        id=TEXT,
        type={"const": "message"},
        role=TEXT,
        model=TEXT,
        content=_list(_object(type=TEXT)),
        stop_reason=MAYBE_TEXT,
        usage=_object(input_tokens=COUNT, output_tokens=COUNT),
    ),
    "/api/chat": _object(model=TEXT, created_at=TEXT, done=BOOLEAN, message=_object(role=TEXT, content=TEXT)),
    "/api/generate": _object(model=TEXT, created_at=TEXT, done=BOOLEAN, response=TEXT),
    "/api/embed": _object(model=TEXT, embeddings=_list(_list(NUMBER)), prompt_eval_count=COUNT),
    "/api/embeddings": _object(embedding=_list(NUMBER)),
    "/generate": {"anyOf": [GENERATED, _list(GENERATED)]},
    **{f"/v2/models/{{name}}{version}/{path}": answer for version in VERSIONS for path, answer in OF_MODELS.items()},
}
LINES = ("/api/chat", "/api/generate")  # which stream lines of JSON
TENSORS = tuple(f"/v2/models/{{name}}{version}/infer" for version in VERSIONS)  # which come as bytes instead


def document(app: FastAPI, error_of: Callable[[str], Schema]) -> None:
    """Makes it when it is first asked for. `error_of`: the shape of a path's errors."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(
                title=app.title,
                version=app.version,
                description=LENIENT,
                routes=[*map(built, app.routes)],
                servers=app.servers,
            )
            for path, operations in app.openapi_schema["paths"].items():
                error = error_of(path)
                for method in HTTP_METHODS:
                    if method in operations:
                        _complete(operations[method]["responses"], path, error)
            schemas = app.openapi_schema.get("components", {}).get("schemas", {})
            ranges.describe(schemas.values())
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(responses: Schema, path: str, error: Schema) -> None:
    responses.pop(UNSENT, None)
    if path in ANSWERS:
        other = "application/x-ndjson" if path in LINES else BYTES if path in TENSORS else EVENTS
        text: Schema = {} if other == EVENTS else {"schema": {"type": "string"}}  # each event has a shape of its own
        responses["200"]["content"] = {"application/json": {"schema": ANSWERS[path]}, other: text}
    for status, description in STATUSES.items():
        responses[status] = {"description": description, "content": {"application/json": {"schema": error}}}
