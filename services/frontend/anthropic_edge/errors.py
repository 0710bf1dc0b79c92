"""Conversion of errors to Anthropic's object: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from quire.services.frontend.http.dialect import ErrorFormat
from quire.services.frontend.http.document.schemas import TEXT, object_of
from quire.shared.errors import QuireError, transport

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
FAULT = "api_error"


def error_object(message: str, status: int, reason: str = "") -> dict[str, Any]:
    """Returns the error object; `reason`: a code that clients check."""
    details = {"details": {"error_code": reason}} if reason else {}
    return {"type": "error", "error": {"type": TYPES.get(status, FAULT), "message": message, **details}}


def status_of(error: QuireError) -> int:
    return transport(error).http_status


def as_object(error: QuireError) -> dict[str, Any]:
    return error_object(error.message, status_of(error), error.reason)


def as_response(error: QuireError) -> Response:
    headers = {"retry-after": str(math.ceil(error.retry_after_ms / 1000))} if error.retry_after_ms else {}
    return Response(orjson.dumps(as_object(error)), status_of(error), headers, media_type="application/json")


def plain_response(status: int, message: str) -> Response:
    return Response(orjson.dumps(error_object(message, status)), status, media_type="application/json")


SCHEMA = object_of(type={"const": "error"}, error=object_of(type=TEXT, message=TEXT))
ERRORS = ErrorFormat(as_response, plain_response, SCHEMA)
