"""Calls without a right key are refused before their message is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from quire.shared.errors import QuireError, transport

HEALTH = "/grpc.health.v1."
KEYS = ("authorization", "x-api-key")

Check = Callable[[dict[str, str | bytes]], QuireError | None]
Refused = Callable[[str, QuireError], None]  # method's path, why


class CallGuard(grpc.aio.ServerInterceptor):
    """`check` gets a call's metadata and returns why it may not pass. Health checks always pass."""

    def __init__(self, check: Check, refused: Refused = lambda _method, _error: None) -> None:
        """`refused` hears of calls that may not."""
        self._check = check
        self._refused = refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method.startswith(HEALTH):
            return await continuation(handler_call_details)
        error = self._check(metadata_of(handler_call_details.invocation_metadata))
        if error is None:
            return await continuation(handler_call_details)
        self._refused(handler_call_details.method, error)
        return _refusing(error)


def _refusing(error: QuireError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(transport(error).grpc_code, error.message)

    return grpc.stream_stream_rpc_method_handler(refuse)  # of streams, whatever it answers: no message is awaited


def metadata_of(pairs: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str | bytes]:
    """By name. Who shows two keys shows none: which one counts is for no one to choose."""
    sent = tuple(pairs or ())
    found = dict(sent)
    if len(found) < len(sent):
        times = Counter(name for name, _ in sent)
        found |= {name: "" for name in KEYS if times[name] > 1}
    return found


def bearer(metadata: dict[str, str | bytes]) -> bytes:
    """What `authorization: Bearer ...` holds; empty if there is none."""
    shown = metadata.get("authorization", "")
    scheme, _, value = (shown if isinstance(shown, str) else shown.decode("latin-1")).partition(" ")
    return value.strip().encode() if scheme.lower() == "bearer" else b""
