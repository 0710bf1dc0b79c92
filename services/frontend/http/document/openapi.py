"""Completes FastAPI's OpenAPI document with all statuses and the schemas of answers."""

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
    "Numbers and booleans may be sent as strings, booleans as numbers, and 0 and 1 as booleans; token ids of prompts "
    "must be integers without a fraction, not even .0; an empty text is accepted if the tokenizer adds special tokens. "
    "Constraints that depend on the model or on settings are not included: context length, vocabulary, whether the "
    "model generates, embeds or classifies, and whether requests have priorities. Ids and tenants must consist of "
    "printable characters."
)
UNUSED_STATUS = "422"  # FastAPI's default for an invalid body; this server sends 400
HTTP_METHODS = ("get", "post", "delete")

STATUSES: Mapping[str, str] = {
    "400": "The request is invalid, or asks for an unsupported feature; do not retry it unchanged",
    "401": "The API key is missing or invalid",
    "403": "The API key does not permit this",
    "404": "The model, response or path does not exist",
    "405": "The path does not support this method",
    "408": "The request was sent too slowly",
    "409": "Conflict with an existing object: an id in use, or a stream of the other port",
    "413": "The body is too large",
    "415": "The Content-Encoding of the body is not supported",
    "429": "The server is full, or the key's rate limit is exceeded; retry after Retry-After",
    "431": "The headers are too large",
    "500": "Internal server error",
    "503": "No worker can serve this now; retry after Retry-After",
    "504": "The deadline passed",
}


def install_openapi(app: FastAPI, dialects: Dialects) -> None:
    """Replaces the app's OpenAPI generator; the document is built on first use. `dialects`: schemas by path."""

    def openapi() -> Schema:
        """Returns the document, which is built at the first call and then stored in the app; pydantic's error schemas
        are removed from it."""
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
    """Adds the schema of the answer and of every error status to an operation's responses, in place. `work`: None for
    paths without admission; `error`: schema of error bodies."""
    responses.pop(UNUSED_STATUS, None)
    if work is not None and work.answer is not None:
        other = work.streamed_as
        text: Schema = {} if other == EVENTS else {"schema": {"type": "string"}}  # events differ in their schema
        responses["200"]["content"] = {"application/json": {"schema": work.answer}, other: text}
    for status, description in STATUSES.items():
        responses[status] = {"description": description, "content": {"application/json": {"schema": error}}}
