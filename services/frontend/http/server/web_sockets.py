"""WebSocket connections: uvicorn's protocol, over the library websockets, within the limits of HTTP connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from quire.services.frontend.http.server.connection_limiter import ConnectionLimiter, DeadlineTimer


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A connection whose client must read what it is sent, and that counts among those of HTTP until it ends."""

    def __init__(self, limiter: ConnectionLimiter, on_lost: Callable[[], None], **given: Any) -> None:
        """`on_lost`: called once when the connection has ended; `given`: those of uvicorn."""
        super().__init__(**given)
        self._limiter, self._on_lost = limiter, on_lost
        self._writing = DeadlineTimer(self.loop)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer and gives back the connection's place."""
        self._writing.close()
        super().connection_lost(exc)
        self._on_lost()

    def pause_writing(self) -> None:
        """Starts the time limit for a client that does not read."""
        super().pause_writing()
        self._writing.set(self._limiter.limits.write_s, self._on_write_timeout)

    def resume_writing(self) -> None:
        self._writing.clear()
        super().resume_writing()

    def _on_write_timeout(self) -> None:
        self._limiter.count_closed("write")
        transport: asyncio.Transport = self.transport
        transport.abort()
