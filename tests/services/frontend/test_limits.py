"""Full at the door, and leaving: what clients of both edges read, with the hint when to come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from shared.pb.admin.v1 import admin_pb2
from shared.pb.common.v1 import sampling_pb2
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

LONG = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(max_tokens=60, ignore_eos=True, seed=1))


async def read(frontend: Running, request: pb.GenerateRequest) -> list[int]:
    return [token async for m in frontend.inference.Generate(request) for token in m.token_ids]


async def test_more_than_fits_is_refused_before_tokenizing(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    settings = {"max_inflight_requests": 3, "retry_after_ms": 1500}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        inside = [asyncio.create_task(read(frontend, LONG)) for _ in range(2)]
        await script.until(lambda: script.num_running == 2)
        reply = await frontend.http.post("/v1/completions", json={"prompt": ["a", "b"]})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(frontend, pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(n=2)))
        metrics = await frontend.metrics()
        script.resume()
        await asyncio.gather(*inside)
        assert (await frontend.http.post("/v1/completions", json={"prompt": ["a", "b"]})).status_code == 200
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "2")
    assert reply.json()["error"]["type"] == "RateLimitError"
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(refused.value).details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert metrics["vllm:admission_rejections_total{reason=max_inflight_requests}"] == 2
    assert metrics["quire_frontend_inflight_requests"] == 2


async def test_promised_tokens_are_bounded(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address, max_queued_tokens=100) as frontend:
        inside = asyncio.create_task(read(frontend, LONG))
        await script.until(lambda: script.num_running)
        reply = await frontend.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 50})
        fits = await frontend.http.post("/v1/completions", json={"prompt": "x" * 999})
        metrics = await frontend.metrics()
        script.resume()
        await inside
    assert (reply.status_code, fits.status_code) == (429, 429)
    assert metrics["vllm:admission_rejections_total{reason=max_queued_tokens}"] == 2
    assert metrics["quire_frontend_queued_tokens"] == 61


@pytest.mark.parametrize("by_admin", [True, False])
async def test_draining_finishes_what_runs_and_refuses_the_rest(folder: Path, by_admin: bool) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address) as frontend:
        over_grpc = asyncio.create_task(read(frontend, LONG))
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        over_http = asyncio.create_task(frontend.http.post("/v1/completions", json=body))
        await script.until(lambda: script.num_running == 2)
        if by_admin:
            await frontend.admin.Drain(admin_pb2.DrainRequest())
        else:
            frontend.shutdown.request()
        async with asyncio.timeout(5):
            while (await frontend.http.get("/health")).status_code == 200:
                await asyncio.sleep(0.005)
        health = await health_pb2_grpc.HealthStub(frontend.channel).Check(health_pb2.HealthCheckRequest())
        refused_http = await frontend.http.post("/v1/completions", json=body)
        with pytest.raises(grpc.aio.AioRpcError) as refused_grpc:
            await read(frontend, LONG)
        status = (await frontend.admin.GetStatus(admin_pb2.GetStatusRequest())).services[0]
        script.resume()
        assert len(await over_grpc) == 60
        assert (await over_http).json()["usage"]["completion_tokens"] == 60
        await asyncio.wait_for(frontend.task, 10)
        with pytest.raises(httpx.ConnectError):
            await frontend.http.get("/health")
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (refused_http.status_code, refused_http.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    assert refused_grpc.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (status.state, status.running) == (admin_pb2.STATE_DRAINING, 2)


async def test_a_drain_does_not_wait_for_ever(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address, drain_timeout_s=0.1) as frontend:
        stuck = asyncio.create_task(read(frontend, LONG))
        await script.until(lambda: script.num_running)
        frontend.shutdown.request()
        await asyncio.wait_for(frontend.task, 10)
        with pytest.raises(grpc.aio.AioRpcError):
            await stuck
