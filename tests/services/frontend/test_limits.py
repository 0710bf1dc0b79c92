"""Full at the door, and leaving: what clients of both edges read, with the hint when to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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
from tests.services.frontend import overload
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


async def test_a_full_frontend_refuses_before_it_has_read_the_body(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address, max_inflight_requests=1) as frontend:
        inside = asyncio.create_task(read(frontend, LONG))
        await script.until(lambda: script.num_running)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ncontent-length: 1000\r\n\r\n"
        host, _, port = frontend.frontend.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        answer = (await asyncio.wait_for(reader.readuntil(b"}}"), 5)).decode().lower()
        writer.write(b"x" * 1000 + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")  # the connection is not lost
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
        writer.close()
        metrics = await frontend.metrics()
        script.resume()
        await inside
    assert answer.startswith("http/1.1 429")
    assert "retry-after: 1" in answer
    assert "x-request-id: mine" in answer
    assert metrics["vllm:admission_rejections_total{reason=max_inflight_requests}"] == 1
    assert metrics["http_requests_total{handler=/v1/chat/completions,method=POST,status=4xx}"] == 1


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_bodies_are_bounded(folder: Path, announced: bool, path: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 300

    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address, max_request_bytes=1000) as frontend:
        headers = {"content-type": "application/json"}
        content = b" " * 1001 if announced else pieces()
        refused = await frontend.http.post(path, content=content, headers=headers)
        body = b'{"prompt": "hello"}'
        fits = await frontend.http.post(path, content=body + b" " * (1000 - len(body)), headers=headers)
    assert (refused.status_code, fits.status_code) == (413, 200)
    error = refused.json()["error"]
    assert (error["code"], error["message"]) == (413, f"POST {path}: the body has more than 1000 bytes")


async def test_a_message_that_is_too_long_is_refused_unread(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, max_request_bytes=500) as frontend:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(frontend, pb.GenerateRequest(text="x" * 1000))
        fits = pb.GenerateRequest(text="x" * 400, sampling=sampling_pb2.SamplingParams(max_tokens=3))
        assert len(await read(frontend, fits)) == 3
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in (refused.value.details() or "")
    assert "500" in (refused.value.details() or "")


@pytest.mark.parametrize("edge", ["http", "grpc"])
async def test_ten_times_what_fits_is_refused_at_once_and_disturbs_nobody(folder: Path, edge: str) -> None:
    for chance in range(5):  # somebody else may need the machine at the moment
        calm, crowded = await overload.measure(folder, edge, times=10, seconds=1)
        quick = overload.at(crowded.refused, 0.5) < 0.05 and overload.at(crowded.refused, 0.99) < 0.2
        if quick and overload.at(crowded.accepted, 0.5) < 1.3 * overload.at(calm.accepted, 0.99):
            break
        assert chance < 4, crowded.line()
    assert not calm.refused
    assert len(crowded.refused) > 5 * len(crowded.accepted) > 0
    assert crowded.hints == ({"2"} if edge == "http" else {"grpc-status-details-bin"})
