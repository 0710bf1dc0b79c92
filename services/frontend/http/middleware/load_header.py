"""ORCA: how loaded the cluster is, told in a header of each answer to whoever asks for it (Envoy, gateways).

The names in it are those of vLLM's header: https://github.com/envoyproxy/envoy/issues/6614 defines the formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASKED = b"endpoint-load-metrics-format"
TOLD = b"endpoint-load-metrics"

Load = Callable[[], Mapping[str, float]]  # by name, at this moment


class LoadHeader:
    """Costs nothing but a look at the names of the headers where nobody asks."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = next((value for name, value in scope.get("headers", ()) if name == ASKED), None)
        if asked is None:
            await self._app(scope, receive, send)
            return

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and (told := format_load(asked, self._load())):
                message = {**message, "headers": [*message["headers"], (TOLD, told)]}
            await send(message)

        await self._app(scope, receive, telling)


def format_load(kind: bytes, load: Mapping[str, float]) -> bytes:
    """Empty for a format that is unknown, as it is a hint and no part of the call."""
    match kind.strip().lower():
        case b"json":
            return b"JSON " + json.dumps({"named_metrics": load}).encode()
        case b"text":
            return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items()).encode()
        case _:
            return b""
