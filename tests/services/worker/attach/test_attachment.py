"""One attachment, with a scripted scheduler and engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from quire.services.worker.attach.attachment import Attachment
from quire.services.worker.replica.retained_state import RetainedState
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process.lifecycle import Shutdown
from tests.waiting import loop_turns

PATIENCE_S = 60.0
WELCOME = pb.SchedulerWelcome(scheduler_id="scripted", epoch=1, version="0", heartbeat_interval_ms=60_000)


class Line:
    """Connection to a scripted scheduler."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[pb.AttachResponse] = asyncio.Queue()
        self.heard: asyncio.Queue[pb.AttachRequest] = asyncio.Queue()

    async def read(self) -> pb.AttachResponse:
        return await self.said.get()

    async def write(self, message: pb.AttachRequest) -> None:
        self.heard.put_nowait(message)

    async def order_done(self) -> pb.DeviceOrderDone:
        async with asyncio.timeout(PATIENCE_S):
            while (message := await self.heard.get()).WhichOneof("message") != "device_order_done":
                pass
        return message.device_order_done


class Engine:
    """Records the orders that reach it."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[str | None] = asyncio.Queue()

    async def start_epoch(self, _receiver: Attachment) -> RetainedState:
        return RetainedState([], b"")

    def device_order(self, _receiver: Attachment, order: pb.DeviceOrder) -> None:
        self.orders.put_nowait(order.WhichOneof("order"))


async def welcomed(_welcome: pb.SchedulerWelcome) -> None:
    """Callback that does nothing."""


async def test_drain_does_not_wait_for_a_hanging_device() -> None:
    """The scheduler has ended the previous attachment because the device hangs."""
    resting, shutdown = asyncio.Event(), Shutdown()

    class Hanging(Engine):
        async def start_epoch(self, _receiver: Attachment) -> RetainedState:
            resting.set()
            return await asyncio.get_running_loop().create_future()

    attachment = Attachment(Line(), Hanging(), shutdown, 1.0, lambda _: loop_turns())  # type: ignore[arg-type]
    running = asyncio.create_task(attachment.run(pb.WorkerHello(), welcomed))
    async with asyncio.timeout(PATIENCE_S):
        await resting.wait()
        shutdown.request()
        await running


async def test_weights_dropped_during_the_download_are_not_staged() -> None:
    line, engine, coming, there = Line(), Engine(), asyncio.Event(), asyncio.Event()

    async def fetch(_order: pb.StageWeights) -> Path:
        coming.set()
        await there.wait()
        return Path("folder")

    attachment = Attachment(line, engine, Shutdown(), 1.0, fetch)  # type: ignore[arg-type]
    running = asyncio.create_task(attachment.run(pb.WorkerHello(), welcomed))
    orders: list[dict[str, Any]] = [
        {"stage_weights": pb.StageWeights(stream_id=b"s" * 16)},
        {"drop_weights": pb.DropWeights()},
    ]
    line.said.put_nowait(pb.AttachResponse(welcome=WELCOME))
    line.said.put_nowait(pb.AttachResponse(device_order=pb.DeviceOrder(order_id=1, **orders[0])))
    async with asyncio.timeout(PATIENCE_S):
        await coming.wait()
        line.said.put_nowait(pb.AttachResponse(device_order=pb.DeviceOrder(order_id=2, **orders[1])))
        assert await engine.orders.get() == "drop_weights"
    there.set()
    refused = asyncio.create_task(line.order_done())
    staged = asyncio.create_task(engine.orders.get())
    await asyncio.wait([refused, staged], return_when=asyncio.FIRST_COMPLETED)
    assert not staged.done(), staged
    assert refused.result().order_id == 1
    assert refused.result().error.code == finish_pb2.ERROR_CODE_FAILED_PRECONDITION
    for task in (staged, running):
        task.cancel()
    await asyncio.gather(staged, running, return_exceptions=True)


async def test_heartbeats_before_the_welcome_are_accepted() -> None:
    line, there = Line(), asyncio.Event()

    async def welcomed(_welcome: pb.SchedulerWelcome) -> None:
        there.set()

    attachment = Attachment(line, Engine(), Shutdown(), 1.0, lambda _: loop_turns())  # type: ignore[arg-type]
    running = asyncio.create_task(attachment.run(pb.WorkerHello(), welcomed))
    for _ in range(3):
        line.said.put_nowait(pb.AttachResponse(heartbeat=pb.Heartbeat()))
    line.said.put_nowait(pb.AttachResponse(welcome=WELCOME))
    waiting = asyncio.create_task(there.wait())
    await asyncio.wait([running, waiting], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    assert there.is_set()
    for task in (running, waiting):
        task.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
