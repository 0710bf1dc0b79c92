"""Requests without a worker wait for the first one, within limits on time and number, and are counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from quire.services.frontend.scheduler_client.wait_policy import WaitPolicy
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.waiting import eventually

HELLO = pb.GenerateRequest(text="hello")
HELD = "quire_frontend_held_requests"


async def until_held(frontend: Running, count: int) -> None:
    await eventually(frontend.metrics, lambda found: found[HELD] == count)


async def first_message(frontend: Running, request: pb.GenerateRequest = HELLO) -> pb.GenerateResponse:
    return await anext(aiter(frontend.inference.Generate(request)))


async def test_the_first_worker_is_waited_for_longer_than_a_scheduler(folder: Path) -> None:
    script = ScriptedScheduler(num_workers=0)
    settings = {"unavailable_after_s": 0, "worker_start_s": 60}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        asked = [asyncio.create_task(first_message(frontend)) for _ in range(3)]
        posted = asyncio.create_task(frontend.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}))
        await until_held(frontend, 4)
        script.set_view(num_workers=1)
        assert all(await asyncio.gather(*asked))
        assert (await posted).status_code == 200
        metrics = await frontend.metrics()
    assert (metrics[HELD], metrics["quire_frontend_held_seconds_count"]) == (0, 4)
    assert metrics["quire_frontend_worker_start_seconds"] == 60  # the metric that alerts use for a missing worker


async def test_no_worker_in_time_is_an_error_that_says_so(folder: Path) -> None:
    script = ScriptedScheduler(num_workers=0)
    settings = {"unavailable_after_s": 0, "worker_start_s": 0.2}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        with pytest.raises(grpc.aio.AioRpcError, match=r"no worker became available within 0.2 s") as refused:
            await first_message(frontend)
        reply = await frontend.http.post("/v1/completions", json={"prompt": "x"})
        assert (await frontend.metrics())[HELD] == 0
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


async def test_as_many_requests_wait_as_are_admitted(folder: Path) -> None:
    script = ScriptedScheduler(num_workers=0)
    settings = {"worker_start_s": 60, "max_inflight_requests": 2}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        asked = [asyncio.create_task(first_message(frontend)) for _ in range(2)]
        await until_held(frontend, 2)
        assert (await frontend.http.post("/v1/completions", json={"prompt": "x"})).status_code == 429
        script.set_view(num_workers=1)
        assert all(await asyncio.gather(*asked))


async def test_a_disconnected_request_is_removed(folder: Path) -> None:
    script = ScriptedScheduler(num_workers=0)
    async with scheduler(script), running(folder, script.address, worker_start_s=60) as frontend:
        call = frontend.inference.Generate(HELLO)
        posted = asyncio.create_task(frontend.http.post("/v1/completions", json={"prompt": "x"}))
        await until_held(frontend, 2)
        call.cancel()
        posted.cancel()
        await until_held(frontend, 0)
        await frontend.until_idle()
    assert not script.submissions


async def test_a_deadline_ends_the_wait(folder: Path) -> None:
    script = ScriptedScheduler(num_workers=0)
    async with scheduler(script), running(folder, script.address, worker_start_s=60) as frontend:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await anext(aiter(frontend.inference.Generate(HELLO, timeout=0.3)))
        await until_held(frontend, 0)
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_scheduler_that_is_restarted_meanwhile_costs_nothing(folder: Path) -> None:
    script = ScriptedScheduler(num_workers=0)
    settings = {"unavailable_after_s": 10, "worker_start_s": 60}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        asked = asyncio.create_task(first_message(frontend))
        await until_held(frontend, 1)
        script.break_sessions()
        await frontend.until_open(False)
        await frontend.until_open(True)
        script.set_view(num_workers=1)
        assert await asked


async def test_before_the_first_worker_any_name_may_be_an_adapters(folder: Path) -> None:
    """Only the first worker reports the adapters; afterwards unknown names are refused at once."""
    script = ScriptedScheduler(num_workers=0)
    named = pb.GenerateRequest(text="hello", model="unheard-of")
    async with scheduler(script), running(folder, script.address, worker_start_s=60) as frontend:
        asked = asyncio.create_task(first_message(frontend, named))
        await until_held(frontend, 1)
        script.set_view(num_workers=1)
        for call in (asked, first_message(frontend, named)):
            with pytest.raises(grpc.aio.AioRpcError, match="`unheard-of` does not exist"):
                await call


@pytest.mark.parametrize(
    ("began_s", "seen_s", "has_scheduler", "ends_s"),
    [
        (0, -100, False, 30),  # an outage from the beginning
        (0, -100, True, 600),  # a scheduler without workers
        (0, 300, False, 330),  # its scheduler has just disconnected
        (0, 590, False, 600),  # does not change the maximum wait
        (0, 590, True, 600),
        (100, 50, False, 130),
    ],
)
def test_how_long_one_waits(began_s: float, seen_s: float, has_scheduler: bool, ends_s: float) -> None:
    assert WaitPolicy(30, 600).deadline_s(began_s, seen_s, has_scheduler=has_scheduler) == ends_s


def test_without_a_setting_the_first_worker_is_waited_for_as_a_scheduler_is() -> None:
    assert (
        WaitPolicy(30).deadline_s(0, 20, has_scheduler=True)
        == WaitPolicy(30).deadline_s(0, 20, has_scheduler=False)
        == 50
    )
    assert WaitPolicy(30).max_wait_s == 150
