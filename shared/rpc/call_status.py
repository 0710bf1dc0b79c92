"""Status of a call whose client was still writing when the server ended it.

gRPC's asyncio client learns of the end twice: from the received status and from the failed write. The later one
counts, so that a refusal is sometimes reported as `Internal error from Core`, without its reason.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio
from grpc.aio import AioRpcError

UNINFORMATIVE = (grpc.StatusCode.INTERNAL, grpc.StatusCode.OK)


class CallStatus:
    """Records every status that a client's call reports. Other objects never report one."""

    def __init__(self, call: Any) -> None:
        self._reported: list[AioRpcError] = []
        if isinstance(call, grpc.aio.Call):
            call.add_done_callback(lambda ended: self._reported.append(_status(ended)))

    def resolve(self, error: AioRpcError) -> AioRpcError:
        """Returns the server's status if `error` is only a consequence of it."""
        return next((end for end in (error, *self._reported) if end.code() not in UNINFORMATIVE), error)


def _status(call: Any) -> AioRpcError:
    """Returns the current status: it may be overwritten before a waiting task runs."""
    nothing = grpc.aio.Metadata()
    return AioRpcError(_now(call.code()), nothing, _now(call.trailing_metadata()) or nothing, _now(call.details()))


def _now(value: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that does not wait."""
    try:
        value.send(None)
    except StopIteration as done:
        return done.value
    value.close()
    raise RuntimeError("the call has not ended")
