"""Every error as OpenAI's object: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.http.headers import CALL, REQUEST_ID, request_id_header
from shared.errors import QuireError, transport


def error_object(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def as_object(error: QuireError) -> dict[str, Any]:
    how = transport(error)
    return error_object(error.message, how.openai_type, how.http_status, error.field or None)


def as_response(error: QuireError) -> Response:
    headers = {}
    if error.retry_after_ms:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
    return _json(as_object(error), transport(error).http_status, headers)


def plain_response(status: int, message: str, kind: str) -> Response:
    return _json(error_object(message, kind, status), status, {})


def _json(body: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def _on_quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    request.scope[CALL].error = error
    response = as_response(error)
    response.headers.update(request_id_header(request.headers.get(REQUEST_ID)))
    return response


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    message = f"{field}: {first['msg']}" if field else first["msg"]
    return _json(error_object(message, "BadRequestError", 400, field or None), 400, {})


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = HTTPStatus(error.status_code).phrase.replace(" ", "") + "Error"
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _json(error_object(message, kind, error.status_code), error.status_code, dict(error.headers or {}))


def install(app: FastAPI) -> None:
    app.add_exception_handler(QuireError, _on_quire_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
