"""Tests that resources acquired for a request are released, whatever fails on its way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.scheduler_client import submission
from quire.services.frontend.scheduler_client.sequence import Sequence
from quire.shared.pb.common.v1.sampling_pb2 import SamplingParams
from quire.shared.pb.inference.v1 import inference_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually


@pytest.mark.parametrize("name", ["\\ud800", "a\\u0000b", "a\\nb", "\\u2028", "a" * 257])
async def test_invalid_request_ids_are_refused_without_leaks(folder: Path, name: str) -> None:
    """Checks that lone surrogates, which only Python and JSON accept as text, and line breaks in log lines are
    refused."""
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address, max_inflight_requests=16) as frontend:
        body = f'{{"prompt": "a", "n": 16, "temperature": 1, "max_tokens": 1, "request_id": "{name}"}}'
        for _ in range(3):
            headers = {"content-type": "application/json"}
            reply = await frontend.http.post("/v1/completions", content=body.encode(), headers=headers)
            assert reply.status_code == 400, reply.text
            assert "request_id" in reply.json()["error"]["message"]
        await frontend.until_idle()
        fits = await frontend.http.post("/v1/completions", json={"prompt": "a", "n": 16, "max_tokens": 1})
    assert fits.status_code == 200


async def test_a_failed_submission_fails_only_its_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = submission.build

    def picky(sequences: list[Sequence], *rest: Any) -> pb.Submission:
        if sequences[0].prompt_request.request_id == "odd":
            raise ValueError("it has a field that no message can hold")
        return build(sequences, *rest)

    monkeypatch.setattr(submission, "build", picky)
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, max_inflight_requests=4) as frontend:
        long = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}
        other = asyncio.create_task(frontend.http.post("/v1/completions", json=long))
        for _ in range(3):
            odd = {"prompt": ["a", "b", "c"], "request_id": "odd", "max_tokens": 1}
            reply = await frontend.http.post("/v1/completions", json=odd)
            assert (reply.status_code, reply.json()["error"]["message"]) == (500, "internal error")
        assert (await other).status_code == 200
        await frontend.until_idle()
        assert len(script.hellos) == 1, "the session goes on"


async def test_disconnected_calls_that_wait_for_a_worker_are_dropped(folder: Path) -> None:
    """Checks that they are dropped at once, not only after their time limit."""
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, unavailable_after_s=60.0) as frontend:
        call = frontend.inference.Generate(
            inference_pb2.GenerateRequest(text="x", sampling=SamplingParams(n=3, max_tokens=400, ignore_eos=True))
        )
        await anext(aiter(call))
        script.pause()
        script.view.num_workers = 0
        script.break_sessions()
        await frontend.until_sessions(0)
        client = frontend.frontend.core.client
        async with asyncio.timeout(60):
            await eventually(lambda: client.num_waiting == 3)
            call.cancel()
            await eventually(lambda: not client.num_waiting and (not frontend.frontend.ingress.admission.num_samples))
