"""The OpenAPI document: what FastAPI finds, and what it cannot: every status that is sent, and the shape of answers."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from quire.services.frontend.http.dialect import EVENTS, InferencePath
from quire.services.frontend.http.dialects import Dialects
from quire.services.frontend.http.document.schemas import Schema
from quire.services.frontend.http.fields import ranges
from quire.services.frontend.http.router import built

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


def install_openapi(app: FastAPI, dialects: Dialects) -> None:
    """Makes it when it is first asked for. `dialects`: shapes of answers and errors, by path."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(
                title=app.title,
                version=app.version,
                description=LENIENT,
                routes=[*map(built, app.routes)],
                servers=app.servers,
            )
            work = dialects.documented_paths()
            for path, operations in app.openapi_schema["paths"].items():
                error = dialects.error_schema(path)
                for method in HTTP_METHODS:
                    if method in operations:
                        _complete(operations[method]["responses"], work.get(path), error)
            schemas = app.openapi_schema.get("components", {}).get("schemas", {})
            ranges.describe(schemas.values())
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(responses: Schema, work: InferencePath | None, error: Schema) -> None:
    responses.pop(UNSENT, None)
    if work is not None and work.answer is not None:
        other = work.streamed_as
        text: Schema = {} if other == EVENTS else {"schema": {"type": "string"}}  # each event has a shape of its own
        responses["200"]["content"] = {"application/json": {"schema": work.answer}, other: text}
    for status, description in STATUSES.items():
        responses[status] = {"description": description, "content": {"application/json": {"schema": error}}}
