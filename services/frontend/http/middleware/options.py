"""Answers OPTIONS and TRACE on every path, without an API key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

OPTIONS, TRACE = "OPTIONS", "TRACE"


class OptionsHandler:
    """Answers OPTIONS with 204 and Allow, as preflights require, and TRACE with 405."""

    def __init__(
        self,
        app: ASGIApp,
        methods: Callable[[Scope], Sequence[str]],
        refusal: Callable[[str, HTTPStatus, str], Response],
    ) -> None:
        """Wraps `app`. `methods`: returns the methods of a call's path; `refusal`: formats a status for the clients of
        a path."""
        self._app = app
        self._methods = methods
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers OPTIONS and TRACE; all other calls go to the app."""
        if scope["type"] != "http" or scope["method"] not in (OPTIONS, TRACE):
            await self._app(scope, receive, send)
            return
        allowed = ", ".join(sorted({*self._methods(scope), OPTIONS}))
        if scope["method"] == OPTIONS:
            response = no_content(allowed)
        else:
            detail = f"{TRACE} {scope['path']}: Method Not Allowed"
            response = self._refusal(scope["path"], HTTPStatus.METHOD_NOT_ALLOWED, detail)
            response.headers["allow"] = allowed
        await response(scope, receive, send)


def no_content(allowed: str) -> Response:
    return Response(status_code=HTTPStatus.NO_CONTENT, headers={"allow": allowed})
