"""Route class for APIs with their own error format."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.services.frontend.http.body import BodyReader, JsonBytes, json_only
from quire.services.frontend.http.dialect import ErrorFormat
from quire.services.frontend.http.dialects import Dialects
from quire.services.frontend.http.fields.validation_errors import as_invalid_argument
from quire.services.frontend.http.headers import CALL, DIALECTS
from quire.shared.errors import QuireError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def dialect_route(
    bounds: BodyReader,
    errors: ErrorFormat,
    *,
    json_bytes: JsonBytes = json_only,
    any_type: bool = False,
) -> type[APIRoute]:
    """Returns a route class that reads the body and answers errors, also those of its handler, in this format.
    `json_bytes`, `any_type`: see BodyReader.handle."""

    class DialectRoute(APIRoute):
        """A route that checks the body and answers errors in the dialect's format."""

        def get_route_handler(self) -> Handler:
            """Returns FastAPI's handler with the body checked before and its errors formatted."""
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                """Runs the handler; a QuireError, a validation error or an HTTPException becomes a response, and the
                first two are noted in the call."""
                try:
                    return await bounds.handle(request, handle, at_once=False, json_bytes=json_bytes, any_type=any_type)
                except QuireError as error:
                    request.scope[CALL].error = error
                    dialects: Dialects = request.scope[DIALECTS]
                    return errors.of_error(dialects.in_client_terms(request.url.path, error))
                except RequestValidationError as error:
                    request.scope[CALL].error = invalid = as_invalid_argument(error)
                    return errors.of_error(invalid)
                except HTTPException as error:
                    return errors.of_status(error.status_code, str(error.detail))

            return guarded

    return DialectRoute
