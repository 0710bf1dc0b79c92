"""A scheduler scripted by tests, over real gRPC."""

from __future__ import annotations

import asyncio

import grpc.aio

from quire.shared.pb.common.v1 import media_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.pb.worker.v1 import worker_pb2_grpc
from quire.shared.rpc.server import Server

PATIENCE_S = 60.0
HEARTBEAT_MS = 60_000  # it sends none: silence of five ends a session, however slow the machine is


class Session:
    """The scheduler's side of one attachment."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._refusal = ""
        self.over = asyncio.Event()

    async def hello(self) -> pb.WorkerHello:
        message = await self._next()
        assert message.WhichOneof("message") == "hello"
        return message.hello

    async def welcome(self, epoch: int) -> None:
        welcome = pb.SchedulerWelcome(
            scheduler_id="scripted",
            epoch=epoch,
            version="0",
            max_steps_in_flight=2,
            heartbeat_interval_ms=HEARTBEAT_MS,
        )
        await self._context.write(pb.AttachResponse(welcome=welcome))

    async def plan(self, *plans: pb.StepPlan) -> None:
        for plan in plans:
            await self._context.write(pb.AttachResponse(plan=plan))

    async def cache_reset(self) -> None:
        await self._context.write(pb.AttachResponse(cache_reset=pb.CacheReset()))

    async def result(self) -> pb.StepResult:
        message = await self._next()
        assert message.WhichOneof("message") == "result", message
        return message.result

    async def load_adapter(self, order: pb.LoadAdapter) -> None:
        await self._context.write(pb.AttachResponse(load_adapter=order))

    async def unload_adapter(self, order: pb.UnloadAdapter) -> None:
        await self._context.write(pb.AttachResponse(unload_adapter=order))

    async def adapter_loaded(self) -> pb.AdapterLoaded:
        message = await self._next()
        assert message.WhichOneof("message") == "adapter_loaded", message
        return message.adapter_loaded

    async def prepare_media(self, item: media_pb2.MediaItem, address: str) -> pb.MediaPrepared:
        order = pb.PrepareMedia(item=item, address=address)
        await self._context.write(pb.AttachResponse(prepare_media=order))
        message = await self._next()
        assert message.WhichOneof("message") == "media_prepared", message
        return message.media_prepared

    async def release_media(self, identifier: bytes) -> None:
        await self._context.write(pb.AttachResponse(release_media=pb.ReleaseMedia(identifier=identifier)))

    async def leaving(self) -> None:
        message = await self._next()
        assert message.WhichOneof("message") == "leaving"

    async def ended(self) -> None:
        """Waits until the worker has closed the call without sending anything else."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while (message := await self._context.read()) is not grpc.aio.EOF:
                    assert message.WhichOneof("message") == "heartbeat", message
            except (grpc.aio.BaseError, asyncio.CancelledError):
                pass
        self.over.set()

    def close(self) -> None:
        self.over.set()

    def refuse(self, text: str) -> None:
        self._refusal = text
        self.over.set()

    async def serve(self) -> None:
        await self.over.wait()
        if self._refusal:
            await self._context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._refusal)

    async def _next(self) -> pb.AttachRequest:
        async with asyncio.timeout(PATIENCE_S):
            while (message := await self._context.read()).WhichOneof("message") == "heartbeat":
                pass
        return message


class ScriptedScheduler(worker_pb2_grpc.WorkerServiceServicer):
    """Passes each attachment to the test that awaits it."""

    def __init__(self) -> None:
        self._sessions: asyncio.Queue[Session] = asyncio.Queue()
        self._server: Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Starts serving, on the same port as before after a restart."""
        self._server = Server("127.0.0.1", self.port, [])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.methods)
        await self._server.start()
        self.port = self._server.port

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def attached(self, epoch: int) -> tuple[Session, pb.WorkerHello]:
        session = await self.dialled()
        hello = await session.hello()
        await session.welcome(epoch)
        return session, hello

    async def dialled(self) -> Session:
        async with asyncio.timeout(PATIENCE_S):
            return await self._sessions.get()

    async def Attach(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        session = Session(context)
        await self._sessions.put(session)
        await session.serve()
