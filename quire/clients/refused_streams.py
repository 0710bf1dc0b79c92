"""Answers to calls whose client may still be sending when its server says no."""

from __future__ import annotations

from typing import Any

from grpc.aio import AioRpcError

from quire.requests import from_rpc
from quire.shared.rpc.call_status import CallStatus


async def await_answer(call: Any) -> Any:
    """Of a call that is under way, its answer. Raises QuireError: what the server said."""
    ending = CallStatus(call)
    try:
        return await call
    except AioRpcError as error:
        raise from_rpc(ending.resolve(error)) from None
