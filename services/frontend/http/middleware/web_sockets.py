"""Dispatches WebSocket connections by their path; all HTTP calls pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.services.frontend.http.middleware.path_normalizer import normalize_path


class WebSockets:
    """Middleware in front of all others: an application of WebSocket connections does its own checks."""

    def __init__(self, app: ASGIApp, sockets: Mapping[str, ASGIApp]) -> None:
        """Wraps `app`, which answers HTTP. `sockets`: applications by path."""
        self._app, self._sockets = app, sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application of the connection's path; the server accepts no others (takes_web_socket())."""
        app = self._sockets[scope["path"]] if scope["type"] == "websocket" else self._app
        await app(scope, receive, send)


def takes_web_socket(paths: Collection[str], root_path: str) -> Callable[[bytes], bool]:
    """Returns a function that says whether a target, as sent, has one of these paths. `root_path`: see
    PathNormalizer."""
    known, prefix = frozenset(path.encode() for path in paths), root_path.encode()
    return lambda target: normalize_path(target.partition(b"?")[0], prefix) in known
