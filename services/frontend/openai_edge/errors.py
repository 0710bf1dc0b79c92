"""Conversion of errors to OpenAI's object: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

from quire.services.frontend.http.dialect import ErrorFormat
from quire.services.frontend.http.document.schemas import OPTIONAL_TEXT, TEXT, object_of
from quire.shared.errors import QuireError, Unimplemented, transport

NOT_OFFERED = "not_offered"  # code of errors that are permanent for this server, while another may succeed


def error_object(message: str, kind: str, code: int | str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_object(error: QuireError) -> dict[str, Any]:
    """Returns OpenAI's error object; its code is the error's reason, else the HTTP status."""
    how = transport(error)
    code = error.reason or (NOT_OFFERED if isinstance(error, Unimplemented) else how.http_status)
    return error_object(error.message, how.openai_type, code, error.field or None)


def as_response(error: QuireError) -> Response:
    """Returns the error as JSON with its HTTP status and, if the error says when to retry, retry-after in whole
    seconds."""
    headers = {}
    if error.retry_after_ms:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
    return _json(as_object(error), transport(error).http_status, headers)


def plain_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an error response for a standard HTTP status."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + "Error"
    return _json(error_object(message, kind, status), status, dict(headers or {}))


def _json(body: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


SCHEMA = object_of(
    error=object_of(message=TEXT, type=TEXT, param=OPTIONAL_TEXT, code={"type": ["integer", "string", "null"]})
)
ERRORS = ErrorFormat(as_response, plain_response, SCHEMA)
