"""A path in front of all paths, as proxies that share an address among servers show them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.http.headers import Headers
from services.frontend.http.protocol import Refuse


class RootPath:
    """Whether the proxy cuts it off or not: behind this there are only the server's own paths."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        """`root`: as in /llm."""
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = cut(scope["path"].encode(), self._root.encode()).decode()
            scope = {**scope, "path": path, "root_path": self._root}
        await self._app(scope, receive, send)


def cut(path: bytes, root: bytes) -> bytes:
    return path[len(root) :] if path.startswith(root + b"/") else path


def rooted(refuse: Refuse, root: str) -> Refuse:
    """The same for a door that reads targets as they were sent."""
    as_sent = root.encode()

    def refuse_rooted(method: bytes, target: bytes, headers: Headers) -> bytes | None:
        return refuse(method, cut(target, as_sent), headers)

    return refuse_rooted
