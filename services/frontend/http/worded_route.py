"""Routes of an API that has words of its own for errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.services.frontend.http.as_sent import as_sent
from quire.services.frontend.http.body import BodyBounds, JsonBytes, all_of_it
from quire.services.frontend.http.headers import CALL
from quire.services.frontend.http.validation_errors import worded
from quire.shared.errors import QuireError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def worded_route(
    bounds: BodyBounds,
    as_response: Callable[[QuireError], Response],
    plain_response: Callable[[int, str], Response],
    *,
    json_bytes: JsonBytes = all_of_it,
    any_type: bool = False,
) -> type[APIRoute]:
    """The kind of route that answers with these errors. `plain_response`: of a status and a text. `json_bytes`,
    `any_type`: as BodyBounds.handle takes them."""

    class WordedRoute(APIRoute):
        """Checks, does what it did, and words what went wrong."""

        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    return await bounds.handle(request, handle, at_once=False, json_bytes=json_bytes, any_type=any_type)
                except QuireError as error:
                    request.scope[CALL].error = error
                    return as_response(as_sent(request.url.path, error))
                except RequestValidationError as error:
                    request.scope[CALL].error = wrong = worded(error)
                    return as_response(wrong)
                except HTTPException as error:
                    return plain_response(error.status_code, str(error.detail))

            return guarded

    return WordedRoute
