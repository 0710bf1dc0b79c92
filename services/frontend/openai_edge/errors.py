"""Every error as OpenAI's object: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.services.frontend.http.as_sent import as_sent
from quire.services.frontend.http.headers import CALL
from quire.services.frontend.http.validation_errors import worded
from quire.shared.errors import QuireError, Unimplemented, transport

NOT_OFFERED = "not_offered"  # the code of what would be wrong again here, and may be right elsewhere


def error_object(message: str, kind: str, code: int | str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_object(error: QuireError) -> dict[str, Any]:
    how = transport(error)
    code = error.reason or (NOT_OFFERED if isinstance(error, Unimplemented) else how.http_status)
    return error_object(error.message, how.openai_type, code, error.field or None)


def as_response(error: QuireError) -> Response:
    headers = {}
    if error.retry_after_ms:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
    return _json(as_object(error), transport(error).http_status, headers)


def plain_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """A status that HTTP has a word for."""
    kind = HTTPStatus(status).phrase.replace(" ", "") + "Error"
    return _json(error_object(message, kind, status), status, dict(headers or {}))


def _json(body: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def _on_quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    request.scope[CALL].error = error
    return as_response(as_sent(request.url.path, error))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    request.scope[CALL].error = wrong = worded(error)
    return as_response(wrong)


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return plain_response(error.status_code, of_route(request, error), error.headers)


def of_route(request: Request, error: HTTPException) -> str:
    """What was asked of a path or a method that is not there."""
    return f"{request.method} {request.url.path}: {error.detail}"


def install(app: FastAPI) -> None:
    app.add_exception_handler(QuireError, _on_quire_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
