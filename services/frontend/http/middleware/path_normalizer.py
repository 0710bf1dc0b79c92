"""Paths as proxies and clients write them, to the server's own.

Without a path in front that a proxy shows, without a slash at the end, and without empty parts (`/v1//models`, of a
base URL that ends with a slash), which a redirect could not cut off: a server does not know under which address it is
seen. The path in front is known here alone: a router that knew it would cut it off once more, and serve what the guards
took for another path.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.services.frontend.http.headers import Headers
from quire.services.frontend.http.server.protocol import Refuse


class PathNormalizer:
    """Behind this there are no others."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        """`root`: what a proxy shows in front, as in /llm, whether it cuts that off or not; or empty."""
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = normalize_path(scope["path"].encode(), self._root.encode()).decode()
            if path != scope["path"]:
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)


def normalize_path(path: bytes, root: bytes) -> bytes:
    """`root`: as PathNormalizer takes it."""
    while b"//" in path:
        path = path.replace(b"//", b"/")
    if root and path.startswith(root + b"/"):
        path = path[len(root) :]
    return path[:-1] if path.endswith(b"/") and len(path) > 1 else path


def with_normalized_path(refuse: Refuse, root: str) -> Refuse:
    """The same for a door that reads targets as they were sent."""
    as_sent = root.encode()

    def refuse_own(method: bytes, target: bytes, headers: Headers) -> bytes | None:
        return refuse(method, normalize_path(target.partition(b"?")[0], as_sent), headers)

    return refuse_own
