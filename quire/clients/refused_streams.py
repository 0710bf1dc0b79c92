"""Reads the response of a call whose client may still be sending when the server refuses it."""

from __future__ import annotations

from typing import Any

from grpc.aio import AioRpcError

from quire.rpc_errors import from_rpc
from quire.shared.rpc.call_status import CallStatus


async def await_answer(call: Any) -> Any:
    """Awaits the response of a call in progress. Raises QuireError with the server's error."""
    ending = CallStatus(call)
    try:
        return await call
    except AioRpcError as error:
        raise from_rpc(ending.resolve(error)) from None
