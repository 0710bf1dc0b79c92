"""Which gRPC calls are refused by their headers while the frontend is full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.services.frontend.bounds.messages import REQUESTS
from quire.services.frontend.grpc_edge.admission_interceptor import INFERENCE_METHODS
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler

NO_MESSAGE = b"\xff\xff"  # not a protobuf message: parsing it gives INVALID_ARGUMENT
LONG = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(max_tokens=60, ignore_eos=True))
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
COUNT = "quire_frontend_grpc_requests_total{code=RESOURCE_EXHAUSTED,method=Generate}"
REJECTED = "vllm:admission_rejections_total{reason=max_inflight_requests}"


@asynccontextmanager
async def full(folder: Path, **settings: Any) -> AsyncIterator[Running]:
    """A frontend whose admission limit is used up."""
    script = ScriptedScheduler()
    script.pause()
    one_place = {"max_inflight_requests": 1, "retry_after_ms": 1500, **settings}
    metadata = (("authorization", "Bearer secret"),)
    async with scheduler(script), running(folder, script.address, **one_place) as frontend:
        call = frontend.inference.Generate(LONG, metadata=metadata)
        held = asyncio.create_task(call.read())
        await script.until(lambda: script.num_running)
        yield frontend
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def error_of(frontend: Running, path: str, message: bytes, **arguments: Any) -> grpc.aio.AioRpcError | None:
    try:
        async for _ in frontend.channel.unary_stream(path)(message, **arguments):
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


def code(error: grpc.aio.AioRpcError | None) -> grpc.StatusCode:
    return grpc.StatusCode.OK if error is None else error.code()


async def test_inference_calls_are_refused_unread_with_a_retry_hint(folder: Path) -> None:
    async with full(folder) as frontend:
        refused = [await error_of(frontend, path, NO_MESSAGE) for path in sorted(INFERENCE_METHODS)]
    assert [code(error) for error in refused] == [EXHAUSTED] * len(INFERENCE_METHODS)
    for error in refused:
        assert error is not None
        assert (
            error.details() == "max_inflight_requests: 1 in flight and 1 requested exceed the limit of 1; retry later"
        )
        retry = error_details_pb2.RetryInfo()
        status = rpc_status.from_call(error)
        assert status is not None
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 1500


async def test_below_the_limit_the_message_is_read(folder: Path) -> None:
    async with running(folder, until_health=(503,)) as frontend:
        found = [code(await error_of(frontend, path, NO_MESSAGE)) for path in sorted(INFERENCE_METHODS)]
    assert found == [grpc.StatusCode.INVALID_ARGUMENT] * len(INFERENCE_METHODS)


async def test_all_other_methods_are_still_answered(folder: Path) -> None:
    """INFERENCE_METHODS has every method that acquires a lease; request streams are refused request by request."""
    others = sorted(REQUESTS.keys() - INFERENCE_METHODS)
    async with full(folder) as frontend:
        found = {path: code(await error_of(frontend, path, b"", timeout=60)) for path in others}
    assert EXHAUSTED not in found.values(), found
    assert found["/quire.inference.v1.InferenceService/ListModels"] is grpc.StatusCode.OK


async def test_the_refused_are_counted_like_any_call(folder: Path) -> None:
    path = "/quire.inference.v1.InferenceService/Generate"
    async with full(folder) as frontend:
        for _ in range(100):
            await error_of(frontend, path, LONG.SerializeToString())
        metrics = await frontend.metrics()
    assert (metrics[COUNT], metrics[REJECTED]) == (100, 100)


async def test_a_draining_frontend_says_so(folder: Path) -> None:
    async with full(folder) as frontend:
        frontend.frontend.ingress.admission.close()
        error = await error_of(frontend, sorted(INFERENCE_METHODS)[0], NO_MESSAGE)
    assert error is not None
    assert (error.code(), error.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "this frontend is draining; send the request again, to another frontend",
    )


async def test_without_a_key_the_load_is_not_revealed(folder: Path) -> None:
    async with full(folder, api_key="secret") as frontend:
        found = [code(await error_of(frontend, path, NO_MESSAGE)) for path in sorted(INFERENCE_METHODS)]
    assert found == [grpc.StatusCode.UNAUTHENTICATED] * len(INFERENCE_METHODS)


async def test_a_long_message_is_refused_before_it_is_there(folder: Path) -> None:
    """The refusal is sent while the client has sent only part of its message."""
    async with full(folder) as frontend:
        call = frontend.channel.stream_stream("/quire.inference.v1.InferenceService/Generate")()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(call.read(), 60)
    assert refused.value.code() is EXHAUSTED
