"""How a call has ended whose client was still writing when its server said no.

gRPC's client for asyncio learns of that twice: from the status that came, and from a message that it could not send any
more. What it hears last counts, so that now and then a refusal reads `Internal error from Core` and nobody knows why.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio
from grpc.aio import AioRpcError

UNTOLD = (grpc.StatusCode.INTERNAL, grpc.StatusCode.OK)


class CallStatus:
    """What a client's call has ended with, each time that it was told so. Anything else never tells."""

    def __init__(self, call: Any) -> None:
        self._told: list[AioRpcError] = []
        if isinstance(call, grpc.aio.Call):
            call.add_done_callback(lambda ended: self._told.append(_status(ended)))

    def resolve(self, error: AioRpcError) -> AioRpcError:
        """What the server said, if `error` is not that."""
        return next((end for end in (error, *self._told) if end.code() not in UNTOLD), error)


def _status(call: Any) -> AioRpcError:
    """As it is now: it may be another one before anybody who waits for it goes on."""
    nothing = grpc.aio.Metadata()
    return AioRpcError(_now(call.code()), nothing, _now(call.trailing_metadata()) or nothing, _now(call.details()))


def _now(value: Coroutine[Any, Any, Any]) -> Any:
    """Of something that needs not be waited for."""
    try:
        value.send(None)
    except StopIteration as done:
        return done.value
    value.close()
    raise RuntimeError("the call has not ended")
