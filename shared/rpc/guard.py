"""Refuses gRPC calls without a valid key before their messages are read."""

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
Refused = Callable[[str, QuireError], None]  # path of the method, error


class CallGuard(grpc.aio.ServerInterceptor):
    """Interceptor. `check` receives a call's metadata and returns an error if the call must not pass. Health checks
    always pass."""

    def __init__(self, check: Check, refused: Refused = lambda _method, _error: None) -> None:
        """`refused`: called for each refused call."""
        self._check = check
        self._refused = refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Returns the method's handler, or, if `check` returns an error, reports the refusal and returns a handler
        that aborts the call without reading a message."""
        if handler_call_details.method.startswith(HEALTH):
            return await continuation(handler_call_details)
        error = self._check(metadata_of(handler_call_details.invocation_metadata))
        if error is None:
            return await continuation(handler_call_details)
        self._refused(handler_call_details.method, error)
        return _refusing(error)


def _refusing(error: QuireError) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler that aborts every call with `error` before a message is read."""

    async def refuse(_messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(transport(error).grpc_code, error.message)

    return grpc.stream_stream_rpc_method_handler(
        refuse
    )  # a stream handler for all methods, so that no message is read first


def metadata_of(pairs: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str | bytes]:
    """Returns metadata by name. If a key header is repeated, it counts as missing, because the choice would be
    ambiguous."""
    sent = tuple(pairs or ())
    found = dict(sent)
    if len(found) < len(sent):
        times = Counter(name for name, _ in sent)
        found |= {name: "" for name in KEYS if times[name] > 1}
    return found


def bearer(metadata: dict[str, str | bytes]) -> bytes:
    """Returns the token of `authorization: Bearer ...`; empty if there is none."""
    shown = metadata.get("authorization", "")
    scheme, _, value = (shown if isinstance(shown, str) else shown.decode("latin-1")).partition(" ")
    return value.strip().encode() if scheme.lower() == "bearer" else b""
