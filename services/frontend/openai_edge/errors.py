"""Every error as OpenAI's object: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
from quire.shared.errors import InvalidArgument, QuireError, Unimplemented, transport

LONGEST_SHOWN = 64  # characters of a wrong value
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


def worded(error: RequestValidationError) -> InvalidArgument:
    """The first of pydantic's errors: the field as it was sent, what is wrong with it, and the value if it is short."""
    found = error.errors()[0]
    if found["type"] == "json_invalid":
        return InvalidArgument(f"the body is not JSON: {found['ctx']['error']} at character {found['loc'][-1]}")
    field = ".".join(_sent(found["loc"], error.body, is_missing=found["type"] == "missing"))
    if not field and found["type"] == "missing":
        return InvalidArgument("the body is empty; it has to be a JSON object")
    return InvalidArgument(f"{field or 'the body'}: {found['msg']}{_given(found)}", field=field)


def _sent(loc: Sequence[int | str], body: Any, *, is_missing: bool) -> Iterator[str]:
    """The parts of a place that stand in the body, and of a missing field its name. Pydantic also names the kinds of
    value among which it looked for the right one (`stop.str`)."""
    place, *parts = loc
    if place != "body":  # of the path or the query
        yield from map(str, loc)
        return
    within = body
    for number, part in enumerate(parts, 1):
        is_there = part in within if isinstance(within, dict) else isinstance(within, list) and isinstance(part, int)
        if is_there:
            within = within[part]
        if is_there or (is_missing and number == len(parts)):
            yield str(part)


def _given(found: Mapping[str, Any]) -> str:
    """Of a value that fits in a line; of what is missing or superfluous the name says all."""
    value = found.get("input")
    is_plain = isinstance(value, str | int | float | bool) and found["type"] not in ("missing", "extra_forbidden")
    return f" ({value!r})" if is_plain and len(repr(value)) <= LONGEST_SHOWN else ""


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
