"""Disconnects and deadlines: the scheduler is notified at once, and admission is released."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.services.frontend.grpc_edge import errors
from quire.shared.pb.common.v1 import finish_pb2, sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.observing import calls_of
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually

LONG = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(max_tokens=500, ignore_eos=True))


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[tuple[ScriptedScheduler, Running]]:
    script = ScriptedScheduler(count_up, step_s=0.002)
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        yield script, frontend


async def assert_ended(script: ScriptedScheduler, frontend: Running, reason: int) -> None:
    """Checks that the scheduler got the reason and runs nothing, and that the frontend has nothing in flight."""
    await script.until(lambda: script.cancellations and not script.num_running)
    assert [why for _, why in script.cancellations] == [reason]
    await frontend.until_idle()


async def test_cancelling_a_grpc_call(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        call = frontend.inference.Generate(LONG)
        await anext(aiter(call))
        script.pause()  # it must not end by itself
        call.cancel()
        await assert_ended(script, frontend, finish_pb2.FINISH_REASON_CANCELLED)
        metrics = await frontend.metrics()
    assert metrics["quire_frontend_cancellations_total{reason=cancelled}"] == 1
    assert metrics["vllm:request_success_total{finished_reason=abort}"] == 1
    assert metrics["quire_frontend_grpc_requests_total{code=CANCELLED,method=Generate}"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_http_clients_that_disconnect(folder: Path, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": stream}
    async with serving(folder) as (script, frontend):
        asking = asyncio.create_task(_read_forever(frontend, body))
        await script.until(lambda: script.most_outputs)
        script.pause()
        asking.cancel()
        await assert_ended(script, frontend, finish_pb2.FINISH_REASON_CANCELLED)


async def _read_forever(frontend: Running, body: dict[str, Any]) -> None:
    async with frontend.http.stream("POST", "/v1/completions", json=body) as reply:
        async for _ in reply.aiter_raw():
            pass


async def test_leaving_while_nothing_could_be_submitted_yet(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        script.set_view(num_workers=0)
        await frontend.until_sessions(0)
        asking = asyncio.create_task(_read_forever(frontend, {"prompt": "x"}))
        await eventually(lambda: frontend.http.get("/load"), lambda found: found.json()["server_load"] != 0)
        asking.cancel()
        await frontend.until_idle()
        assert script.submissions == []


async def test_all_samples_of_a_request_are_cancelled_together(folder: Path) -> None:
    request = pb.GenerateRequest()
    request.CopyFrom(LONG)
    request.sampling.n = 3
    async with serving(folder) as (script, frontend):
        call = frontend.inference.Generate(request)
        await anext(aiter(call))
        script.pause()
        call.cancel()
        await assert_ended(script, frontend, finish_pb2.FINISH_REASON_CANCELLED)
        assert [len(ids) for ids, _ in script.cancellations] == [3]


async def test_a_deadline_is_sent_along_and_ends_the_call(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        script.step_s = 0.02  # of 500 tokens
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in frontend.inference.Generate(LONG, timeout=3):
                pass
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await assert_ended(script, frontend, finish_pb2.FINISH_REASON_DEADLINE)
        assert 0 < script.submissions[0].timeout_ms < 3100  # gRPC rounds the timeout up on the wire, by up to 1 %
        metrics = await frontend.metrics()
    assert metrics["quire_frontend_cancellations_total{reason=deadline}"] == 1


async def test_expired_calls_are_ended_by_grpc_alone(folder: Path) -> None:
    """A status sent at that moment leaks memory in gRPC."""
    async with serving(folder) as (script, frontend):
        script.pause()

        async def late() -> grpc.StatusCode:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                async for _ in frontend.inference.Generate(LONG, timeout=0.5):
                    pass
            return ended.value.code()

        with calls_of(errors.status_of) as statuses:
            codes = await asyncio.gather(*(late() for _ in range(8)))
            assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
            await script.until(lambda: not script.num_running)
            await frontend.until_idle()
    assert statuses == []


async def test_a_deadline_that_passes_while_no_worker_is_there(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        script.set_view(num_workers=0)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in frontend.inference.Generate(LONG, timeout=0.2):
                pass
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_deadline_that_the_scheduler_finds_hopeless(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        code = finish_pb2.ERROR_CODE_DEADLINE_EXCEEDED
        script.refusal = finish_pb2.Error(code=code, message="cannot be met")
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be met") as late:
            async for _ in frontend.inference.Generate(LONG, timeout=60):
                pass
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stop_string_stops_the_scheduler_once_per_step(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        text = (await frontend.http.post("/detokenize", json={"tokens": [66, 67]})).json()["prompt"]
        sampling = sampling_pb2.SamplingParams(max_tokens=400, n=3, seed=60, stop=[text], ignore_eos=True)
        tokens: dict[int, list[int]] = {}
        async for m in frontend.inference.Generate(pb.GenerateRequest(text="x", sampling=sampling)):
            tokens.setdefault(m.index, []).extend(m.token_ids)
        await script.until(lambda: not script.num_running)
    assert tokens == {i: list(range(60 + i, 68)) for i in range(3)}
    assert {why for _, why in script.cancellations} == {finish_pb2.FINISH_REASON_STOP}
    assert sorted(i for ids, _ in script.cancellations for i in ids) == [1, 2, 3]
