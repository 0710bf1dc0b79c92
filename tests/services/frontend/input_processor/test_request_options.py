"""Tests of priority, tenant, deadline, repetition and final-only answers over both edges, down to the scheduler's
messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.shared.columns import i32
from quire.shared.pb.common.v1 import finish_pb2, sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually

Sampling = sampling_pb2.SamplingParams
BODY = {"prompt": "x", "max_tokens": 40, "seed": 3}


@asynccontextmanager
async def serving(folder: Path, **view: Any) -> AsyncIterator[tuple[ScriptedScheduler, Running]]:
    script = ScriptedScheduler(count_up, **view)
    async with scheduler(script), running(folder, script.address) as frontend:
        yield script, frontend


async def generate(frontend: Running, request: pb.GenerateRequest, **call: Any) -> list[pb.GenerateResponse]:
    return [message async for message in frontend.inference.Generate(request, **call)]


async def test_ids_are_forwarded_unchanged_and_the_error_names_a_wrong_one(folder: Path) -> None:
    ids = [7, 3, 3, 12]
    async with serving(folder) as (script, frontend):
        await generate(frontend, pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=Sampling(max_tokens=1)))
        assert (await frontend.http.post("/v1/completions", json={**BODY, "prompt": ids})).status_code == 200
        assert [i32(s.token_ids).tolist() for s in script.submissions] == [ids, ids]
        with pytest.raises(grpc.aio.AioRpcError, match="Token id 4294967295 is out of vocabulary"):
            await generate(frontend, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7, 2**32 - 1])))
        for wrong in (-1, 2**40, 2**70):
            refused = await frontend.http.post("/v1/completions", json={**BODY, "prompt": [7, wrong]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
            assert f"{wrong}" in refused.json()["error"]["message"]


async def test_priority_needs_schedulers_with_the_priority_policy(folder: Path) -> None:
    request = pb.GenerateRequest(text="x", options=pb.RequestOptions(priority=-5))
    async with serving(folder, scheduling_policy="priority") as (script, frontend):
        assert (await frontend.http.post("/v1/completions", json={**BODY, "priority": 7})).status_code == 200
        await generate(frontend, request)
        assert [s.priority for s in script.submissions] == [7, -5]
        script.set_view(scheduling_policy="fair")
        await eventually(
            lambda: frontend.http.post("/v1/completions", json={**BODY, "priority": 7}),
            lambda found: found.status_code == 400,
        )
        refused = await frontend.http.post("/v1/completions", json={**BODY, "priority": 7})
        with pytest.raises(grpc.aio.AioRpcError, match="the schedulers' policy is fair") as also:
            await generate(frontend, request)
        assert (await frontend.http.post("/v1/completions", json={**BODY, "priority": 0})).status_code == 200
    assert refused.json()["error"]["param"] == "priority"
    assert refused.json()["error"]["message"].endswith("the schedulers' policy is fair")
    assert also.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_priority_needs_every_scheduler(folder: Path) -> None:
    one, two = (ScriptedScheduler(count_up, scheduling_policy=policy) for policy in ("priority", "fcfs"))
    async with scheduler(one), scheduler(two), running(folder, one.address, two.address) as frontend:
        await frontend.until_sessions(2)
        refused = await frontend.http.post("/v1/completions", json={**BODY, "priority": 7})
    assert (refused.status_code, refused.json()["error"]["message"][-4:]) == (400, "fcfs")


async def test_tenants_in_the_body_or_in_a_header(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        header = {"x-tenant": "header"}
        await frontend.http.post("/v1/completions", json=BODY, headers=header)
        await frontend.http.post("/v1/completions", json={**BODY, "tenant": "body"}, headers=header)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        await frontend.http.post("/v1/chat/completions", json=chat, headers=header)
        metadata = (("x-tenant", "metadata"),)
        few = pb.GenerateRequest(text="x", sampling=Sampling(max_tokens=2))
        await generate(frontend, few, metadata=metadata)
        few.options.tenant = "message"
        await generate(frontend, few, metadata=metadata)
        assert [s.tenant for s in script.submissions] == ["header", "body", "header", "metadata", "message"]
        long = await frontend.http.post("/v1/completions", json=BODY, headers={"x-tenant": "t" * 257})
        with pytest.raises(grpc.aio.AioRpcError, match="tenant must have at most 256 characters, got 257"):
            await generate(frontend, pb.GenerateRequest(text="x"), metadata=(("x-tenant", "t" * 257),))
    assert (long.status_code, long.json()["error"]["param"]) == (400, "tenant")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_over_http_is_forwarded_and_kept(folder: Path, stream: bool) -> None:
    async with serving(folder) as (script, frontend):
        script.pause()
        late = await frontend.http.post(
            "/v1/completions",
            json={**BODY, "stream": stream},
            headers={"x-request-timeout": "4", "x-request-id": "mine"},
        )
        await script.until(lambda: script.cancellations)
        assert 1000 < script.submissions[0].timeout_ms <= 4000
        assert [why for _, why in script.cancellations] == [finish_pb2.FINISH_REASON_DEADLINE]
    error = {"message": "the deadline passed", "type": "DeadlineExceededError", "param": None, "code": 504}
    assert late.headers["x-request-id"] == "mine"
    if stream:  # its headers were sent before the deadline
        event, done = late.text.strip().split("\n\n")
        assert (late.status_code, done) == (200, "data: [DONE]")
        assert json.loads(event.removeprefix("data: ")) == {"error": error}
    else:
        assert (late.status_code, late.json()) == (504, {"error": error})


async def test_a_deadline_that_passes_in_mid_stream_ends_the_stream_with_the_error(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        script.step_s = 0.2  # times 40 tokens
        headers = {"x-request-timeout": "3"}
        late = await frontend.http.post("/v1/completions", json={**BODY, "stream": True}, headers=headers)
    *_, error, done = late.text.strip().split("\n\n")
    assert (late.status_code, done) == (200, "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 504


@pytest.mark.parametrize("written", ["0", "-1", "soon", "nan", "inf", "1e10", ""])
async def test_invalid_timeouts_are_refused(folder: Path, written: str) -> None:
    async with serving(folder) as (_, frontend):
        reply = await frontend.http.post("/v1/completions", json=BODY, headers={"x-request-timeout": written})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-timeout")
    assert reply.json()["error"]["message"].endswith(f"got {written!r}.")


async def test_repetition_detection_is_forwarded_and_reported(folder: Path) -> None:
    script = ScriptedScheduler(lambda sequence: 70 + sequence.num_outputs % 3)
    async with scheduler(script), running(folder, script.address) as frontend:
        rule = {"max_pattern_size": 3, "min_count": 4}
        whole = (await frontend.http.post("/v1/completions", json={**BODY, "repetition_detection": rule})).json()
        chat = {"messages": [{"role": "user", "content": "x"}], "repetition_detection": {**rule, "min_pattern_size": 2}}
        chat_answer = (await frontend.http.post("/v1/chat/completions", json=chat)).json()
        detection = sampling_pb2.RepetitionDetection(max_pattern_size=3, min_count=2)
        messages = await generate(
            frontend, pb.GenerateRequest(text="x", sampling=Sampling(repetition_detection=detection))
        )
        metrics = await frontend.metrics()
    for choice in (whole["choices"][0], chat_answer["choices"][0]):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert whole["usage"]["completion_tokens"] == 12
    assert messages[-1].finish_reason == finish_pb2.FINISH_REASON_REPETITION
    assert [token for message in messages for token in message.token_ids] == [70, 71, 72] * 2
    told = [s.sampling.repetition_detection for s in script.submissions]
    assert [(r.min_pattern_size, r.max_pattern_size, r.min_count) for r in told] == [(1, 3, 4), (2, 3, 4), (1, 3, 2)]
    assert metrics["vllm:request_success_total{finished_reason=repetition}"] == 3


async def test_repetition_detection_is_not_sent_by_default(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        await frontend.http.post("/v1/completions", json=BODY)
        assert not script.submissions[0].sampling.HasField("repetition_detection")


@pytest.mark.parametrize("stop", [[], ["zzz"]])
async def test_final_only_sends_one_message_per_sample(folder: Path, stop: list[str]) -> None:
    """Checks that the message equals the joined pieces of a stream."""
    sampling = Sampling(n=3, seed=60, max_tokens=30, stop_token_ids=[85], logprobs=1, stop=stop)
    request = pb.GenerateRequest(text="hello", sampling=sampling)
    async with serving(folder) as (script, frontend):
        frontend.write_each_token(script)
        pieces = await generate(frontend, request)
        request.options.final_only = True
        whole = await generate(frontend, request)
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], sampling=sampling)
        chat.options.final_only = True
        chat_messages = [message async for message in frontend.inference.Chat(chat)]
    assert sorted(message.index for message in whole) == [0, 1, 2]
    assert whole[0].index == 2  # it ended first
    for message in whole:
        parts = [piece for piece in pieces if piece.index == message.index]
        assert len(parts) > 1
        assert message.token_ids == [token for piece in parts for token in piece.token_ids]
        assert message.text == "".join(piece.text for piece in parts) != ""
        assert len(message.logprobs) == len(message.token_ids)
        assert (message.finish_reason, message.stop_token_id) == (parts[-1].finish_reason, parts[-1].stop_token_id)
    assert whole[-1].usage.completion_tokens == sum(len(message.token_ids) for message in whole)
    assert whole[0].usage.prompt_tokens == pieces[0].usage.prompt_tokens
    assert [message.content for message in sorted(chat_messages, key=lambda m: m.index)] == [
        message.text for message in sorted(whole, key=lambda m: m.index)
    ]


async def test_final_only_output_ends_at_the_stop_string(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        text = (await frontend.http.post("/detokenize", json={"tokens": [66, 67]})).json()["prompt"]
        request = pb.GenerateRequest(text="x", sampling=Sampling(seed=60, max_tokens=300, stop=[text]))
        request.options.final_only = True
        (message,) = await generate(frontend, request)
        await script.until(lambda: not script.num_running)
    assert (message.stop_string, list(message.token_ids)) == (text, list(range(60, 68)))


async def test_errors_end_final_only_requests(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        script.refusal = finish_pb2.Error(code=finish_pb2.ERROR_CODE_INTERNAL, message="no")
        request = pb.GenerateRequest(text="x", options=pb.RequestOptions(final_only=True))
        with pytest.raises(grpc.aio.AioRpcError, match="no"):
            await generate(frontend, request)
