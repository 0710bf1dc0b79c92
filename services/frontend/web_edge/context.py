"""Substitute for gRPC's context in the methods of InferenceService."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import Message

from quire.services.frontend.web_edge.call_status import DETAILS, WebCallStatus
from quire.shared.errors import InvalidArgument

UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
MOST_DIGITS = 10
GRPC_TIMEOUT, CONNECT_TIMEOUT = "grpc-timeout", "connect-timeout-ms"


class CallEnded(Exception):
    """Signal that the method has ended the call."""

    def __init__(self, ending: WebCallStatus) -> None:
        super().__init__(ending.message)
        self.ending = ending


class WebContext:
    """Context of one call: the part of grpc.aio.ServicerContext that the methods need."""

    ends_with_its_status = True  # also after the deadline, which no other component checks

    def __init__(self, metadata: dict[str, str], write: Callable[[Message], Awaitable[None]], peer: str) -> None:
        """Creates a context; raises InvalidArgument for a malformed timeout.

        `peer`: HOST:PORT of the client.
        """
        self._metadata = metadata
        self._peer = peer
        self.write = write
        self.trailers: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        timeout_s = _timeout_s(metadata)
        self._ends_s = None if timeout_s is None else self._loop.time() + timeout_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._metadata.items())

    def peer(self) -> str:
        return self._peer

    def time_remaining(self) -> float | None:
        return None if self._ends_s is None else self._ends_s - self._loop.time()

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        self.trailers = dict(metadata)

    async def abort_with_status(self, status: Any) -> None:
        """Ends the method by raising CallEnded with the status and its details, as gRPC's context does."""
        details = dict(status.trailing_metadata or ()).get(DETAILS, b"")
        raise CallEnded(WebCallStatus(status.code, status.details, details))

    async def abort(self, code: grpc.StatusCode, message: str = "") -> None:
        raise CallEnded(WebCallStatus(code, message))


def _timeout_s(metadata: dict[str, str]) -> float | None:
    """Returns the call's timeout in seconds from Connect's header (ms) or gRPC's (digits and unit), None without
    either. Raises InvalidArgument for a malformed duration."""
    if CONNECT_TIMEOUT in metadata:
        written, unit = metadata[CONNECT_TIMEOUT], "m"
        name = CONNECT_TIMEOUT
    elif GRPC_TIMEOUT in metadata:
        written, unit = metadata[GRPC_TIMEOUT][:-1], metadata[GRPC_TIMEOUT][-1:]
        name = GRPC_TIMEOUT
    else:
        return None
    if unit not in UNITS_S or not (written.isascii() and written.isdigit()) or len(written) > MOST_DIGITS:
        raise InvalidArgument(f"{name} is not a duration: {metadata[name][:40]!r}", field=name)
    return int(written) * UNITS_S[unit]
