"""How a call ends whose client is still sending when its server has said no.

gRPC's client for asyncio learns of that twice: from the status that came, and from a message that it could not send any
more. What it hears last counts, so that now and then a refusal reads `Internal error from Core` and nobody knows why.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import grpc
from grpc.aio import AioRpcError

from quire.requests import from_rpc


async def answered(call: Any) -> Any:
    """Of a call that is under way, its answer. Raises QuireError: what the server said."""
    heard: list[AioRpcError] = []
    call.add_done_callback(lambda ended: heard.append(_status(ended)))
    try:
        return await call
    except AioRpcError as error:
        known = [end for end in (error, *heard) if end.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.OK)]
        raise from_rpc((known or [error])[0]) from None


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
