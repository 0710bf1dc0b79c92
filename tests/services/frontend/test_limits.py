"""Tests of a full and of a draining frontend: errors of both edges, with retry-after."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.observing import calls_of
from tests.services.frontend.load import burst, overload
from tests.services.frontend.load.overload import at
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually

LONG = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(max_tokens=60, ignore_eos=True, seed=1))


async def read(frontend: Running, request: pb.GenerateRequest) -> list[int]:
    return [token async for m in frontend.inference.Generate(request) for token in m.token_ids]


async def test_calls_beyond_the_capacity_are_refused_before_tokenizing(folder: Path) -> None:
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


async def test_an_invalid_request_has_released_its_slot_when_its_error_arrives(folder: Path) -> None:
    """Checks that the slot is free, and the refusal counted, before the client gets the error."""
    script = ScriptedScheduler(count_up)
    wrong = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(n=3, temperature=-1))
    right = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(n=3, max_tokens=1))
    refusals = "quire_frontend_grpc_requests_total{code=INVALID_ARGUMENT,method=Generate}"
    async with scheduler(script), running(folder, script.address, max_inflight_requests=3) as frontend:
        for number in range(10):
            with pytest.raises(grpc.aio.AioRpcError, match="temperature must be"):
                await read(frontend, wrong)
            assert frontend.frontend.ingress.admission.num_samples == 0
            assert (await frontend.metrics())[refusals] == number + 1
            assert len(await read(frontend, right)) == 3


async def test_a_request_that_can_never_fit_is_a_permanent_error_also_while_others_run(folder: Path) -> None:
    """Checks that the error is permanent; where lengths are reduced, only the possible tokens count as promised."""
    script = ScriptedScheduler(count_up)
    script.pause()
    messages = [{"role": "user", "content": "x"}]
    huge = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(max_tokens=5_000_000, ignore_eos=True))
    async with scheduler(script), running(folder, script.address, max_queued_tokens=1200) as frontend:
        inside = [asyncio.create_task(read(frontend, LONG))]
        await script.until(lambda: script.num_running)
        for path, body, name in (
            ("/v1/completions", {"prompt": "x"}, "max_tokens"),
            ("/v1/chat/completions", {"messages": messages}, "max_tokens"),
            ("/v1/responses", {"input": "x"}, "max_output_tokens"),
        ):
            reply = await frontend.http.post(path, json={**body, name: 5_000_000})
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            assert (error["param"], error["code"]) == (name, "context_length_exceeded")
            assert "context length is 512 tokens. However, you requested 5000000 output tokens" in error["message"]
        with pytest.raises(grpc.aio.AioRpcError, match="However, you requested 5000000 output tokens"):
            await read(frontend, huge)
        model = frontend.frontend.core.catalogue.name
        message = {"model": model, "messages": messages, "max_tokens": 5_000_000}
        inside += [asyncio.create_task(frontend.http.post("/v1/messages", json=message)) for _ in range(2)]
        await script.until(lambda: script.num_running == 3)
        assert 60 + 512 < (await frontend.metrics())["quire_frontend_queued_tokens"] < 1200
        script.resume()
        await asyncio.gather(*inside)


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
async def test_draining_finishes_running_calls_and_refuses_new_ones(folder: Path, by_admin: bool) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address, drain_timeout_s=60.0) as frontend:
        over_grpc = asyncio.create_task(read(frontend, LONG))
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
        over_http = asyncio.create_task(frontend.http.post("/v1/completions", json=body))
        await script.until(lambda: script.num_running == 2)
        if by_admin:
            await frontend.admin.Drain(admin_pb2.DrainRequest())
        else:
            frontend.shutdown.request()
        await eventually(lambda: frontend.http.get("/health"), lambda found: found.status_code != 200)
        health = await health_pb2_grpc.HealthStub(frontend.channel).Check(health_pb2.HealthCheckRequest())
        refused_http = await frontend.http.post("/v1/completions", json=body)
        with pytest.raises(grpc.aio.AioRpcError) as refused_grpc:
            await read(frontend, LONG)
        status = (await frontend.admin.GetStatus(admin_pb2.GetStatusRequest())).services[0]
        script.resume()
        assert len(await over_grpc) == 60
        assert (await over_http).json()["usage"]["completion_tokens"] == 60
        await asyncio.wait_for(frontend.task, 60)
        with pytest.raises(httpx.ConnectError):
            await frontend.http.get("/health")
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (refused_http.status_code, refused_http.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    assert refused_grpc.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (status.state, status.running) == (admin_pb2.STATE_DRAINING, 2)


async def test_a_drain_has_a_time_limit(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address, drain_timeout_s=0.1) as frontend:
        stuck = asyncio.create_task(read(frontend, LONG))
        await script.until(lambda: script.num_running)
        frontend.shutdown.request()
        await asyncio.wait_for(frontend.task, 60)
        with pytest.raises(grpc.aio.AioRpcError):
            await stuck


async def test_a_full_frontend_refuses_before_it_has_read_the_body(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address, max_inflight_requests=1) as frontend:
        inside = asyncio.create_task(read(frontend, LONG))
        await script.until(lambda: script.num_running)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: mine\r\n"
        head += b"content-length: 1000\r\n\r\n"
        host, _, port = frontend.frontend.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        answer = (await asyncio.wait_for(reader.readuntil(b"}}"), 60)).decode().lower()
        writer.write(b"x" * 1000 + b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")  # the connection stays usable
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
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


async def test_a_client_that_sends_too_much_gets_the_error(folder: Path) -> None:
    """Checks this for a client that is still writing when the limit is exceeded."""
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address, max_request_bytes=8 << 20) as frontend:
        assert b" 413 " in await asyncio.to_thread(send_all_then_read, frontend.frontend.http_address, 24 << 20)


def send_all_then_read(address: str, length: int) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        connection.sendall(b"connection: close\r\ncontent-length: %d\r\n\r\n" % length + b" " * length)
        return connection.recv(1000)


async def test_too_long_messages_are_refused_without_reading_them(folder: Path) -> None:
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
@pytest.mark.slow
async def test_ten_times_the_capacity_is_refused_at_once_and_does_not_delay_admitted_calls(
    folder: Path, edge: str
) -> None:
    """Compares with answers at low load on the same machine, which may be busy: with steps of 40 ms, ten times the
    capacity is 200 calls per second, so that clients and frontend do not need the whole machine."""
    for chance in range(5):
        calm, crowded = await overload.measure(folder, edge, times=10, seconds=4, step_s=0.04)
        usual_s = at(calm.accepted, 0.5)
        quick = at(crowded.refused, 0.5) < usual_s / 4 and at(crowded.refused, 0.99) < usual_s
        if quick and at(crowded.accepted, 0.5) < 1.5 * at(calm.accepted, 0.99):
            break
        assert chance < 4, f"{calm.line()}; {crowded.line()}"
    assert len(crowded.refused) > 5 * len(crowded.accepted) > 0
    assert crowded.hints == ({"2"} if edge == "http" else {"grpc-status-details-bin"})


async def test_refusals_are_sent_before_admitted_calls_are_served(folder: Path) -> None:
    """Counts operations, not time: of a burst, hardly anything is prepared before the last refusal is written."""
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address, max_inflight_requests=16) as frontend:
        frontend.frontend.ingress.calls.preparation_queue.clock = lambda: (
            100.0
        )  # refusals come first for a bounded time
        host, _, port = frontend.frontend.http_address.rpartition(":")
        sent = burst.message(480, 16)
        callers = [socket.create_connection((host, int(port))) for _ in range(100)]  # no call is admitted meanwhile
        for caller in callers:
            caller.sendall(sent)
        with calls_of(InputProcessor.prepare, Calls.log_refusal) as calls:
            await eventually(lambda: len(calls) >= 100)
        for caller in callers:
            caller.close()
    happened = [call.name for call in calls]
    assert happened.count("log_refusal") == 84
    before_the_last = happened[: 100 - happened[::-1].index("log_refusal")]
    assert before_the_last.count("prepare") <= 4


async def test_a_call_of_another_tenant_is_prepared_within_a_burst(folder: Path, tmp_path: Path) -> None:
    """Counts operations, not time: 64 calls that arrived before it are not prepared first."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": name, "key": f"sk-{name}"} for name in ("burst", "other")]}))
    keys.chmod(0o600)
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=str(keys)) as frontend:
        host, _, port = frontend.frontend.http_address.rpartition(":")
        sent = burst.message(480, 16)
        callers = [socket.create_connection((host, int(port))) for _ in range(65)]
        with calls_of(InputProcessor.prepare) as calls:
            for number, caller in enumerate(callers):
                tenant = "other" if number == 64 else "burst"
                caller.sendall(sent.replace(b"host:", f"authorization: Bearer sk-{tenant}\r\nhost:".encode(), 1))
            await eventually(lambda: len(calls) == 65)
        for caller in callers:
            caller.close()
        await frontend.until_idle(authorization="Bearer sk-other")
    assert [call.arguments["request"].tenant for call in calls].index("other") < 16


async def test_slow_bodies_occupy_no_slot(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address, max_inflight_requests=1) as frontend:
        host, _, port = frontend.frontend.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = burst.message(480, 16)
        writer.write(sent[:-100])
        await writer.drain()
        for _ in range(3):
            reply = await frontend.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert reply.status_code == 200
        writer.write(sent[-100:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_refused_connection_serves_the_next_call(folder: Path) -> None:
    """Checks this also where the unread body arrives late, and where the client asked to close the connection."""
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address, max_inflight_requests=1) as frontend:
        host, _, port = frontend.frontend.http_address.rpartition(":")
        lease = frontend.frontend.ingress.admission.lease()
        lease.acquire(1, 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = burst.message(480, 16)
        for _ in range(3):
            writer.write(sent[:-100])
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            assert head.startswith("HTTP/1.1 429 Too Many Requests\r\n")
            assert "retry-after: 1\r\n" in head
            body = json.loads(await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0])))
            assert body["error"]["code"] == 429
            writer.write(sent[-100:])
        lease.release()
        writer.write(sent.replace(b"host: localhost\r\n", b"host: localhost\r\nconnection: close\r\n"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
