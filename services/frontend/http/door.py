"""Calls that nothing has room for are refused from their headers: no body is read, nothing is parsed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def door(check_open: Callable[[], None]) -> type[APIRoute]:
    """The kind of route for which `check_open` raises while there is no room."""

    class DoorRoute(APIRoute):
        """Checks, then does what it did."""

        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                check_open()
                return await handle(request)

            return guarded

    return DoorRoute
