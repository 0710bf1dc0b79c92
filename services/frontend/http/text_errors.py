"""Errors of Ollama and of the open inference protocol: an object with the message only, {"error": message}."""

from __future__ import annotations

import math

import orjson
from starlette.responses import Response

from quire.services.frontend.http.dialect import ErrorFormat
from quire.services.frontend.http.document.schemas import TEXT, object_of
from quire.shared.errors import QuireError, transport


def as_object(error: QuireError) -> dict[str, str]:
    return {"error": error.message}


def as_response(error: QuireError) -> Response:
    """Returns the error as a JSON response with its HTTP status, and Retry-After in seconds if the error has a hint."""
    headers = {"retry-after": str(math.ceil(error.retry_after_ms / 1000))} if error.retry_after_ms else {}
    return Response(
        orjson.dumps(as_object(error)), transport(error).http_status, headers, media_type="application/json"
    )


def plain_response(status: int, message: str) -> Response:
    return Response(orjson.dumps({"error": message}), status, media_type="application/json")


ERRORS = ErrorFormat(as_response, plain_response, object_of(error=TEXT))
