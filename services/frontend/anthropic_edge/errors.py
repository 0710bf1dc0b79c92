"""Every error as Anthropic's object: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.frontend.http.as_sent import as_sent
from services.frontend.http.body import BodyBounds
from services.frontend.http.headers import CALL
from services.frontend.openai_edge.errors import worded
from shared.errors import QuireError, transport

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

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
    """`reason`: a word that clients look for."""
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


def anthropic_route(bounds: BodyBounds) -> type[APIRoute]:
    """The kind of route that answers with these errors."""

    class AnthropicRoute(APIRoute):
        """Checks, does what it did, and words what went wrong."""

        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    return await bounds.handle(request, handle, at_once=False)
                except QuireError as error:
                    request.scope[CALL].error = error
                    return as_response(as_sent(request.url.path, error))
                except RequestValidationError as error:
                    request.scope[CALL].error = wrong = worded(error)
                    return as_response(wrong)
                except HTTPException as error:
                    return plain_response(error.status_code, str(error.detail))

            return guarded

    return AnthropicRoute
