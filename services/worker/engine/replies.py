"""Replies to the scheduler other than step results, sent from any thread through the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from quire.services.worker.engine.commands import ResultReceiver
from quire.services.worker.structured.compile_pool import CompileResult
from quire.shared.errors import Internal, QuireError, to_proto
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import worker_pb2 as pb

log = logger("worker.engine")


class Replies:
    """Sends replies on the event loop; those for an attachment that has ended are dropped there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.receiver: ResultReceiver | None = None  # the current attachment; set on the event loop

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Schedules a call on the event loop, from any thread; does nothing if the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def resolve(self, future: asyncio.Future[Any], value: Any) -> None:
        """Sets the result of a future on the event loop, unless it is done."""
        self.post(_set_result, future, value)

    def fail(self, future: asyncio.Future[Any], error: BaseException) -> None:
        """Sets the exception of a future on the event loop, unless it is done."""
        self.post(set_exception, future, error)

    def grammar_prepared(self, receiver: ResultReceiver, grammar_id: bytes, prepared: CompileResult) -> None:
        """Reports a compiled grammar or its error to `receiver`."""
        error = to_proto(prepared.error) if prepared.error else None
        message = pb.GrammarPrepared(grammar_id=grammar_id, error=error, compile_us=prepared.compile_us)
        self._send(receiver, receiver.grammar_prepared, message)

    def media_prepared(self, receiver: ResultReceiver, prepared: pb.MediaPrepared) -> None:
        self._send(receiver, receiver.media_prepared, prepared)

    def blocks_transferred(self, receiver: ResultReceiver, done: pb.Transferred) -> None:
        self._send(receiver, receiver.blocks_transferred, done)

    def move_failed(self, receiver: ResultReceiver, transfer_id: int, error: Exception) -> None:
        """Logs and reports a transfer that failed, as an Internal error."""
        log.error("block transfer failed", transfer=transfer_id, error=f"{type(error).__name__}: {error}")
        proto = to_proto(Internal(f"{type(error).__name__}: {error}"))
        self.blocks_transferred(receiver, pb.Transferred(transfer_id=transfer_id, error=proto))

    def adapter_loaded(self, receiver: ResultReceiver, order_id: int, digest: bytes) -> None:
        self._send(receiver, receiver.adapter_loaded, pb.AdapterLoaded(order_id=order_id, digest=digest))

    def adapter_failed(self, receiver: ResultReceiver, order_id: int, error: Exception) -> None:
        """Reports why an adapter cannot be loaded; errors other than QuireError become Internal."""
        loaded = pb.AdapterLoaded(order_id=order_id, error=to_proto(_as_quire_error(error)))
        self._send(receiver, receiver.adapter_loaded, loaded)

    def order_done(self, receiver: ResultReceiver, order: pb.DeviceOrder, error: Exception | None) -> None:
        """Logs and reports an executed device order or its error; errors other than QuireError become Internal."""
        kind = order.WhichOneof("order")
        if error is None:
            log.info("device order executed", order=kind)
            done = pb.DeviceOrderDone(order_id=order.order_id)
        else:
            log.warning("device order failed", order=kind, error=f"{type(error).__name__}: {error}")
            done = pb.DeviceOrderDone(order_id=order.order_id, error=to_proto(_as_quire_error(error)))
        self._send(receiver, receiver.device_order_done, done)

    def _send(self, receiver: ResultReceiver, call: Callable[[Any], None], message: Any) -> None:
        """Posts `call(message)` to the event loop, where it is dropped if `receiver` is no longer current."""
        self.post(self._send_on_loop, receiver, call, message)

    def _send_on_loop(self, receiver: ResultReceiver, call: Callable[[Any], None], message: Any) -> None:
        if receiver is self.receiver:
            call(message)


def _as_quire_error(error: Exception) -> QuireError:
    return error if isinstance(error, QuireError) else Internal(f"{type(error).__name__}: {error}")


def as_failure(error: BaseException) -> Exception:
    """Converts a thread's BaseException to an Exception, as awaiting a BaseException looks like a cancellation of the
    awaiting coroutine."""
    return error if isinstance(error, Exception) else Internal(f"{type(error).__name__}: {error}")


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    """Sets the exception of a future that is not done. Called on the event loop."""
    if not future.done():
        future.set_exception(error)
