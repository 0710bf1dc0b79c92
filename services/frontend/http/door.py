"""Calls that nothing has room for are refused from their headers: no body is read, nothing is parsed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from services.frontend.http.body import BodyBounds

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Door:
    """What a call passes before its handler sees it."""

    def __init__(self, check_open: Callable[[], None], bounds: BodyBounds) -> None:
        """`check_open` raises while there is no room."""
        self._check_open = check_open
        self._bounds = bounds

    async def handle(self, request: Request, handler: Handler, *, at_once: bool = True) -> Response:
        """`at_once`: the handler waits for nothing."""
        self._check_open()
        return await self._bounds.handle(request, handler, at_once=at_once)

    def route(self, *, at_once: bool = True) -> type[APIRoute]:
        """The kind of route whose calls come through this door."""
        door = self

        class DoorRoute(APIRoute):
            """Checks, then does what it did."""

            def get_route_handler(self) -> Handler:
                handler = super().get_route_handler()

                async def guarded(request: Request) -> Response:
                    return await door.handle(request, handler, at_once=at_once)

                return guarded

        return DoorRoute
