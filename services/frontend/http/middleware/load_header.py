"""ORCA: reports the cluster's load in a response header to callers that ask for it (Envoy, gateways).

Metric names are those of vLLM's header. https://github.com/envoyproxy/envoy/issues/6614 defines the formats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_HEADER = b"endpoint-load-metrics-format"
RESPONSE_HEADER = b"endpoint-load-metrics"

Load = Callable[[], Mapping[str, float]]  # present values by metric name


class LoadHeader:
    """Adds the load header if the caller asks for it; otherwise costs one pass over the header names."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the app; adds the load to the answer's headers if the call asks for a known format."""
        kind = next((format_ for name, format_ in scope.get("headers", ()) if name == REQUEST_HEADER), None)
        if kind is None:
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            """Adds the load to the response's headers, if its format is known."""
            if message["type"] == "http.response.start" and (value := format_load(kind, self._load())):
                message = {**message, "headers": [*message["headers"], (RESPONSE_HEADER, value)]}
            await send(message)

        await self._app(scope, receive, send_with_load)


def format_load(kind: bytes, load: Mapping[str, float]) -> bytes:
    """Returns the header's value in the format `kind`, json or text; empty for an unknown format, since the header is
    only a hint."""
    match kind.strip().lower():
        case b"json":
            return b"JSON " + json.dumps({"named_metrics": load}).encode()
        case b"text":
            return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in load.items()).encode()
        case _:
            return b""
