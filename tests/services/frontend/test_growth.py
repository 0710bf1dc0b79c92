"""Tests that calls of all kinds leave no objects behind: objects are counted, not bytes."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

OURS = (
    "quire.services",
    "quire.shared",
    "grpc",
    "_cython",
    "asyncio",
    "_asyncio",
    "uvloop",
    "contextvars",
    "starlette",
    "prometheus",
)
NOT_OURS = ("quire.services.worker",)  # of the scripted scheduler, which records its messages
UNTIL_DUE = "asyncio.events.TimerHandle"  # cancelled ones stay in asyncio's heap until they are due
BEFORE, CALLS = 20, 60  # numbers of calls: those that fill pools and caches, and those that must leave nothing
MOST = 12  # number of objects of a kind that may exist by chance; CALLS that leak one each are far more
TRIES = 10


def message(**sampling: float) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", sampling=sampling_pb2.SamplingParams(ignore_eos=True, **sampling))  # type: ignore[arg-type]


async def streamed(frontend: Running) -> None:
    async for _ in frontend.inference.Generate(message(max_tokens=6)):
        pass


async def sampled(frontend: Running) -> None:
    async for _ in frontend.inference.Generate(message(max_tokens=6, n=3, temperature=1)):
        pass


async def over_http(frontend: Running) -> None:
    reply = await frontend.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 6, "ignore_eos": True})
    assert reply.status_code == 200


async def constrained(frontend: Running) -> None:
    request = message(max_tokens=6)
    request.sampling.structured_output.regex = "[a-z]{3,12}"
    async for _ in frontend.inference.Generate(request):
        pass


async def cancelled(frontend: Running) -> None:
    call = frontend.inference.Generate(message(max_tokens=400))
    await call.read()
    call.cancel()
    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call.read()


async def disconnected(frontend: Running) -> None:
    host, port = frontend.frontend.http_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "hello", "max_tokens": 400, "stream": true, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    assert await reader.read(100)
    writer.transport.abort()


async def refused(frontend: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await streamed_with(frontend, message(max_tokens=6, temperature=-1))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def streamed_with(frontend: Running, request: pb.GenerateRequest) -> None:
    async for _ in frontend.inference.Generate(request):
        pass


async def on_a_separate_connection(frontend: Running) -> None:
    async with grpc.aio.insecure_channel(
        frontend.frontend.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        answers = channel.unary_unary("/quire.inference.v1.InferenceService/ListModels")
        assert await answers(b"")


KINDS: list[Callable[[Running], Awaitable[None]]] = [
    streamed,
    sampled,
    over_http,
    constrained,
    cancelled,
    disconnected,
    refused,
    on_a_separate_connection,
]


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        yield frontend


def counted() -> Counter[str]:
    """Returns the number of objects of each of our types, and of types made for us."""
    gc.collect()
    kinds = ((str(kind.__module__), kind.__qualname__) for kind in map(type, gc.get_objects()))
    ours = (f"{module}.{name}" for module, name in kinds if module.startswith(OURS) and not module.startswith(NOT_OURS))
    return Counter(name for name in ours if name != UNTIL_DUE)


async def grown(frontend: Running, before: Counter[str]) -> dict[str, int]:
    """Returns the types with more objects after all calls have ended; a client may see an end before the frontend is
    done."""
    await frontend.until_idle()
    for _ in range(TRIES):
        more = {name: count for name, count in (counted() - before).items() if count > MOST}
        if not more:
            break
        await asyncio.sleep(0.1)
    return more


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_calls_leave_no_objects(folder: Path, kind: Callable[[Running], Awaitable[None]]) -> None:
    async with served(folder) as frontend:
        for _ in range(BEFORE):
            await kind(frontend)
        await frontend.until_idle()
        before = counted()
        for _ in range(CALLS):
            await kind(frontend)
        assert await grown(frontend, before) == {}


@pytest.mark.slow
async def test_a_leak_is_detected(folder: Path) -> None:
    """Checks that the test above can fail."""
    async with served(folder) as frontend:
        before = counted()
        kept = [asyncio.get_running_loop().create_future() for _ in range(MOST + 1)]
        assert max((await grown(frontend, before)).values()) >= len(kept)
