"""Normalizes request paths: removes a proxy's path prefix, a trailing slash, and empty segments.

Empty segments (`/v1//models`) come from base URLs with a trailing slash; a redirect could not fix them, since the
server does not know its public address. Only this middleware knows the proxy's prefix: a router that knew it would
remove it again, and serve paths that the guards took for others.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.services.frontend.http.headers import Headers
from quire.services.frontend.http.server.protocol import Refuse


class PathNormalizer:
    """Removes a proxy's prefix and superfluous slashes from the path for all inner middleware."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        """Wraps `app`. `root`: path prefix that a proxy adds, such as /llm, whether the proxy strips it or not; or
        empty."""
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the app with the normalized path; the scope of the caller stays as it is."""
        if scope["type"] in ("http", "websocket"):
            path = normalize_path(scope["path"].encode(), self._root.encode()).decode()
            if path != scope["path"]:
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)


def normalize_path(path: bytes, root: bytes) -> bytes:
    """Returns the path without `root`, double slashes and a slash at the end. `root`: see PathNormalizer."""
    while b"//" in path:
        path = path.replace(b"//", b"/")
    if root and path.startswith(root + b"/"):
        path = path[len(root) :]
    return path[:-1] if path.endswith(b"/") and len(path) > 1 else path


def with_normalized_path(refuse: Refuse, root: str) -> Refuse:
    """Returns `refuse` for targets as sent: it gets the normalized path without the query."""
    prefix = root.encode()

    def refuse_normalized(method: bytes, target: bytes, headers: Headers) -> bytes | None:
        return refuse(method, normalize_path(target.partition(b"?")[0], prefix), headers)

    return refuse_normalized
