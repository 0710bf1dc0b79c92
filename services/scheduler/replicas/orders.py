"""Device orders of one worker besides steps: weights and memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from quire.services.scheduler.values.weights import AT_START
from quire.shared.errors import FailedPrecondition, QuireError, Unavailable, from_proto, to_proto
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

ORDER_TIMEOUT_S = 600.0  # for reading weights
SWAP_TIMEOUT_S = 120.0  # for copying staged weights


class DeviceOrders:
    """Orders of one attachment. Every order ends, with an answer or when the worker has disconnected."""

    def __init__(self, send: Callable[[pb.AttachResponse], None]) -> None:
        self._send = send
        self._order_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[pb.DeviceOrderDone]] = {}
        self._is_gone = False

    async def execute(self, order: pb.DeviceOrder, timeout_s: float = ORDER_TIMEOUT_S) -> None:
        """Sends an order and returns when it has been executed. Raises the worker's error, or Unavailable if the worker
        is gone or does not answer in time. If the caller is cancelled, the worker executes the order nevertheless."""
        try:
            async with asyncio.timeout(timeout_s):
                done = await self.send_order(order)
        except TimeoutError:
            kind = order.WhichOneof("order")
            raise Unavailable(f"the worker did not answer {kind} within {timeout_s:g} s") from None
        if done.HasField("error"):
            raise from_proto(done.error)

    def send_order(self, order: pb.DeviceOrder) -> asyncio.Future[pb.DeviceOrderDone]:
        """Sends an order under a new id without waiting; the returned answer may be awaited or ignored. If the
        worker is gone, the answer is an error at once."""
        answer: asyncio.Future[pb.DeviceOrderDone] = asyncio.get_running_loop().create_future()
        if self._is_gone:
            answer.set_result(_gone(0))
            return answer
        order.order_id = next(self._order_ids)
        self._waiting[order.order_id] = answer
        self._send(pb.AttachResponse(device_order=order))
        return answer

    def receive_done(self, wire: pb.DeviceOrderDone) -> None:
        """Handles the worker's answer. Raises FailedPrecondition for an unknown order."""
        answer = self._waiting.pop(wire.order_id, None)
        if answer is None:
            raise FailedPrecondition(f"order_id: the scheduler awaits no answer to order {wire.order_id}")
        if not answer.done():
            answer.set_result(wire)

    def fail_pending(self) -> None:
        """Fails all orders in progress, because the worker has disconnected."""
        self._is_gone = True
        for order_id, answer in self._waiting.items():
            if not answer.done():
                answer.set_result(_gone(order_id))
        self._waiting.clear()


def _gone(order_id: int) -> pb.DeviceOrderDone:
    return pb.DeviceOrderDone(order_id=order_id, error=to_proto(Unavailable("the worker has disconnected")))


def weights_of(hello: pb.WorkerHello) -> model_pb2.WeightsIdentity:
    """Returns the weights that a worker computes with; the initial weights if it does not name any."""
    return (
        hello.weights_state.weights
        if hello.weights_state.HasField("weights")
        else model_pb2.WeightsIdentity(version=AT_START)
    )


def with_worker_name(worker: str, refusal: QuireError) -> QuireError:
    """Returns the error with the worker's name in its message."""
    return type(refusal)(f"{worker}: {refusal.message}", field=refusal.field, retry_after_ms=refusal.retry_after_ms)
