"""Sessions with schedulers: broken sessions, placement, and requests that cannot be served."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from pathlib import Path

import grpc
import grpc.aio
import pytest

from quire.shared.columns import u32_bytes
from quire.shared.errors import FailedPrecondition
from quire.shared.kv import block_hash
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1 import finish_pb2, model_pb2, sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from tests.services.frontend.running import Running as Frontend
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import Running, ScriptedScheduler, count_up, scheduler
from tests.waiting import stays

COUNTING = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(max_tokens=40, seed=3, temperature=1))
COUNTED = [(3 + i) % 200 for i in range(40)]


def tokens_of(messages: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [token for message in messages if message.index == index for token in message.token_ids]


async def until_told(script: ScriptedScheduler, frontend: Frontend, num_tokens: int) -> None:
    """Waits until a sequence has at least so many tokens and all have arrived at the frontend; pauses the script."""
    await script.until(lambda: script.most_outputs >= num_tokens)
    script.pause()
    await frontend.until_caught_up(script)


async def test_a_session_that_breaks_in_mid_stream_costs_no_token(folder: Path) -> None:
    script = ScriptedScheduler(count_up, step_s=0.005)
    async with scheduler(script), running(folder, script.address) as frontend:
        reading = asyncio.create_task(_all(frontend.inference.Generate(COUNTING)))
        for num_tokens in (5, 17):
            await until_told(script, frontend, num_tokens)
            script.break_sessions()
            script.resume()
        messages = await reading
        metrics = await frontend.metrics()
    assert tokens_of(messages) == COUNTED
    assert messages[-1].usage == finish_pb2.Usage(prompt_tokens=1, completion_tokens=40)
    assert len(script.submissions) == 3
    first, *again = script.submissions
    for submission in again:
        assert submission.num_prompt_tokens == 1
        assert len(submission.token_ids) > len(first.token_ids)
        assert submission.sampling == first.sampling
    assert metrics["quire_frontend_resubmitted_sequences_total"] == 2
    assert metrics["vllm:generation_tokens_total"] == 40
    assert metrics["vllm:prompt_tokens_total"] == 1
    assert metrics["vllm:request_queue_time_seconds_count"] == 1


async def test_samples_continue_separately_with_their_own_seeds(folder: Path) -> None:
    script = ScriptedScheduler(count_up, step_s=0.005)
    request = pb.GenerateRequest()
    request.CopyFrom(COUNTING)
    request.sampling.n = 3
    async with scheduler(script), running(folder, script.address) as frontend:
        reading = asyncio.create_task(_all(frontend.inference.Generate(request)))
        await until_told(script, frontend, 4)
        script.break_sessions()
        script.resume()
        messages = await reading
    for index in range(3):
        assert tokens_of(messages, index) == [(3 + index + i) % 200 for i in range(40)]
    assert [(s.num_sequences, s.sampling.seed) for s in script.submissions] == [(3, 3), (1, 3), (1, 4), (1, 5)]


async def test_a_request_before_its_first_token_survives_too(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address) as frontend:
        call = frontend.inference.Generate(COUNTING)
        await script.until(lambda: script.num_running)
        script.break_sessions()
        await script.until(lambda: len(script.submissions) == 2)
        script.resume()
        assert tokens_of([m async for m in call]) == COUNTED


async def test_a_scheduler_that_restarts_gets_the_stream_back(folder: Path) -> None:
    before, after = ScriptedScheduler(count_up, step_s=0.005), ScriptedScheduler(count_up)
    async with contextlib.AsyncExitStack() as first_life, contextlib.AsyncExitStack() as second_life:
        await first_life.enter_async_context(scheduler(before))
        async with running(folder, before.address) as frontend:
            reading = asyncio.create_task(_all(frontend.inference.Generate(COUNTING)))
            await until_told(before, frontend, 8)
            await first_life.aclose()
            port = int(before.address.rpartition(":")[2])
            await second_life.enter_async_context(scheduler(after, port))
            messages = await reading
    assert tokens_of(messages) == COUNTED
    assert after.submissions[0].num_prompt_tokens == 1


async def test_work_moves_to_another_scheduler_when_one_dies(folder: Path) -> None:
    dying, other = ScriptedScheduler(count_up, step_s=0.005), ScriptedScheduler(count_up, num_running=5)
    async with scheduler(other), scheduler(dying), running(folder, dying.address, other.address) as frontend:
        await frontend.until_sessions(2)
        reading = asyncio.create_task(_all(frontend.inference.Generate(COUNTING)))
        await until_told(dying, frontend, 8)
        dying.set_view(draining=True)
        dying.break_sessions()
        messages = await reading
    assert tokens_of(messages) == COUNTED
    assert len(dying.submissions) == len(other.submissions) == 1


async def test_work_leaves_a_scheduler_that_lost_its_workers(folder: Path) -> None:
    left, other = ScriptedScheduler(count_up), ScriptedScheduler(count_up, num_running=5)
    left.pause()
    async with scheduler(other), scheduler(left), running(folder, left.address, other.address) as frontend:
        await frontend.until_sessions(2)
        call = frontend.inference.Generate(COUNTING)
        await left.until(lambda: left.num_running)
        left.set_view(num_workers=0)
        assert tokens_of([m async for m in call]) == COUNTED
        await left.until(lambda: left.cancellations)
    assert left.cancellations == [([1], finish_pb2.FINISH_REASON_CANCELLED)]


async def test_new_work_goes_where_least_waits(folder: Path) -> None:
    busy, idle = ScriptedScheduler(num_waiting_tokens=1000), ScriptedScheduler()
    async with scheduler(busy), scheduler(idle), running(folder, busy.address, idle.address) as frontend:
        await frontend.until_sessions(2)
        for _ in range(4):
            async for _ in frontend.inference.Generate(pb.GenerateRequest(text="hello")):
                pass
        status = (await frontend.admin.GetStatus(admin_pb2.GetStatusRequest())).services
    assert (len(busy.submissions), len(idle.submissions)) == (0, 4)
    assert len(status) == 3


async def test_a_burst_between_two_views_is_spread(folder: Path) -> None:
    one, two = ScriptedScheduler(), ScriptedScheduler()
    one.pause()
    two.pause()
    async with scheduler(one), scheduler(two), running(folder, one.address, two.address) as frontend:
        await frontend.until_sessions(2)
        calls = [frontend.inference.Generate(pb.GenerateRequest(text="hello")) for _ in range(6)]
        await one.until(lambda: len(one.submissions) == 3)
        await two.until(lambda: len(two.submissions) == 3)
        for call in calls:
            call.cancel()
    assert len(one.submissions) == len(two.submissions) == 3


async def test_another_model_ends_the_process_with_the_schedulers_error(folder: Path) -> None:
    script = ScriptedScheduler()
    script.reject_hello = "model.fingerprint: frontend has 'a', scheduler has 'b'"
    async with scheduler(script), running(folder, script.address, until_health=()) as frontend:
        with pytest.raises(FailedPrecondition, match="frontend has 'a', scheduler has 'b'"):
            await asyncio.wait_for(frontend.task, 60)


async def test_a_scheduler_with_another_model_is_an_error_that_names_both(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:  # no worker has reported its model yet
        script.view.model.CopyFrom(model_pb2.ModelIdentity(name="tiny", fingerprint="other", vocab_size=5))
        script.set_view()
        with pytest.raises(FailedPrecondition, match=r"model.vocab_size: frontend .* has .*, scheduler scripted has 5"):
            await asyncio.wait_for(frontend.task, 60)


async def test_no_worker_is_unavailable_after_the_patience(folder: Path) -> None:
    script = ScriptedScheduler(num_workers=0)
    async with scheduler(script), running(folder, script.address, unavailable_after_s=0.2) as frontend:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in frontend.inference.Generate(COUNTING):
                pass
        reply = await frontend.http.post("/v1/completions", json={"prompt": "x"})
        listed = (await frontend.inference.ListModels(pb.ListModelsRequest())).models
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["type"] == "ServiceUnavailableError"
    assert [(model.name, model.ready, model.max_model_len) for model in listed] == [("tiny", False, 0)]


async def test_a_worker_that_comes_in_time_serves_what_waits(folder: Path) -> None:
    script = ScriptedScheduler(num_workers=0)
    async with scheduler(script), running(folder, script.address) as frontend:
        call = frontend.inference.Generate(pb.GenerateRequest(text="hello"))
        waiting = asyncio.create_task(anext(aiter(call)))
        await stays(lambda: not waiting.done(), 0.05)
        script.set_view(num_workers=1)
        assert (await waiting).text


async def test_work_waits_longer_while_its_scheduler_comes_back_again_and_again(folder: Path) -> None:
    """The scheduler is killed repeatedly before its worker is back; each reconnect extends the wait."""
    script = ScriptedScheduler(num_workers=0)
    async with scheduler(script), running(folder, script.address, unavailable_after_s=8.0) as frontend:
        waiting = asyncio.create_task(anext(aiter(frontend.inference.Generate(pb.GenerateRequest(text="hello")))))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while loop.time() - began_s < 9.0:
            script.break_sessions()
            await frontend.until_open(False)
            await frontend.until_open(True)
            await stays(lambda: not waiting.done(), 0.2)
        script.set_view(num_workers=1)
        assert (await waiting).text


async def test_work_does_not_wait_for_ever_for_a_scheduler_that_never_stays(folder: Path) -> None:
    script = ScriptedScheduler(num_workers=0)
    async with scheduler(script), running(folder, script.address, unavailable_after_s=0.3) as frontend:
        waiting = asyncio.create_task(anext(aiter(frontend.inference.Generate(pb.GenerateRequest(text="hello")))))
        async with asyncio.timeout(60):
            while not waiting.done():
                script.break_sessions()
                await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError, match="no worker"):
            await waiting


async def test_running_work_without_workers_ends_after_the_patience(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address, unavailable_after_s=0.2) as frontend:
        call = frontend.inference.Generate(COUNTING)
        await script.until(lambda: script.num_running)
        script.set_view(num_workers=0)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in call:
                pass
        await script.until(lambda: script.cancellations)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_no_scheduler_at_all_is_not_healthy(folder: Path) -> None:
    async with running(folder, "127.0.0.1:1", until_health=(503,), unavailable_after_s=0.1) as frontend:
        assert (await frontend.http.get("/health")).status_code == 503
        assert (await frontend.http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        status = (await frontend.admin.GetStatus(admin_pb2.GetStatusRequest())).services
        assert [s.state for s in status] == [admin_pb2.STATE_STARTING, admin_pb2.STATE_DOWN]


@pytest.mark.parametrize("code", [finish_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, finish_pb2.ERROR_CODE_INTERNAL])
async def test_what_a_scheduler_refuses_is_the_clients_answer(folder: Path, code: finish_pb2.ErrorCode) -> None:
    script = ScriptedScheduler()
    script.refusal = finish_pb2.Error(code=code, message="not now", retry_after_ms=2500)
    async with scheduler(script), running(folder, script.address) as frontend:
        streamed = await frontend.http.post("/v1/completions", json={"prompt": "x", "stream": True})
        metrics = await frontend.metrics()
    is_full = code == finish_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert streamed.status_code == (429 if is_full else 500)
    assert streamed.headers["retry-after"] == "3"
    assert streamed.json()["error"]["message"] == "not now"
    assert metrics["vllm:admission_rejections_total{reason=scheduler}"] == is_full
    assert metrics["vllm:request_success_total{finished_reason=error}"] == 1


async def test_a_scheduler_that_is_leaving_is_asked_again(folder: Path) -> None:
    script = ScriptedScheduler()
    script.refusal = finish_pb2.Error(code=finish_pb2.ERROR_CODE_UNAVAILABLE, message="leaving", retry_after_ms=20)
    async with scheduler(script), running(folder, script.address) as frontend:
        call = frontend.inference.Generate(pb.GenerateRequest(text="hello"))
        waiting = asyncio.create_task(anext(aiter(call)))
        await script.until(lambda: len(script.submissions) >= 3)
        script.refusal = None
        assert (await waiting).text


async def test_block_hashes_follow_the_layout(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    ids = list(range(40))
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        sampling=sampling_pb2.SamplingParams(max_tokens=1),
        options=pb.RequestOptions(cache_salt="salt"),
    )
    async with scheduler(script), running(folder, script.address) as frontend:
        async for _ in frontend.inference.Generate(request):
            pass
        script.view.ClearField("layout")
        script.set_view()
        await frontend.until_view(lambda view: not view.HasField("layout"))
        async for _ in frontend.inference.Generate(request):
            pass
    known, unknown = script.submissions
    root = block_hash.root_hash(salt="salt")
    column = array("i", ids).tobytes()
    assert known.root_hash == root
    assert known.block_hashes == b"".join(block_hash.chain(root, column, 16))
    assert len(known.block_hashes) == 2 * 32
    assert unknown.block_hashes == b""


async def test_work_that_a_leaving_worker_still_finishes_is_left_alone(folder: Path) -> None:
    script = ScriptedScheduler(count_up, step_s=0.05)
    async with scheduler(script), running(folder, script.address, unavailable_after_s=1.0) as frontend:
        call = frontend.inference.Generate(COUNTING)
        await script.until(lambda: script.num_running)
        script.set_view(num_workers=0)
        assert tokens_of([m async for m in call]) == COUNTED


async def test_a_token_that_cannot_be_shown_ends_its_request_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def sometimes_wrong(sequence: Running) -> int:
        return -1 if sequence.seed == 13 and sequence.num_outputs == 5 else count_up(sequence)

    script = ScriptedScheduler(sometimes_wrong)
    wrong = pb.GenerateRequest()
    wrong.CopyFrom(COUNTING)
    wrong.sampling.seed = 13
    async with scheduler(script), running(folder, script.address) as frontend:
        right = asyncio.create_task(_tokens(frontend.inference.Generate(COUNTING)))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await _tokens(frontend.inference.Generate(wrong))
        assert await right == COUNTED
        await script.until(lambda: script.cancellations)
    assert ended.value.code() is grpc.StatusCode.INTERNAL
    assert len(script.submissions) == 2
    assert "cannot deliver tokens" in caplog.text


async def _all(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    return [message async for message in call]


async def _tokens(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> list[int]:
    return [token async for message in call for token in message.token_ids]


async def test_a_batch_that_makes_no_sense_breaks_the_session_only(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = ScriptedScheduler(count_up, step_s=0.005)
    nonsense = scheduler_pb2.TokenBatch(sequence_ids=u32_bytes([1, 2, 3]), token_ids=u32_bytes([5]))
    async with scheduler(script), running(folder, script.address) as frontend:
        reading = asyncio.create_task(_tokens(frontend.inference.Generate(COUNTING)))
        await script.until(lambda: script.num_running)
        script.sessions[0].duplex.send(scheduler_pb2.SessionResponse(tokens=nonsense))
        assert await reading == COUNTED
    assert len(script.submissions) == 2
    assert "session failed" in caplog.text


async def test_samples_that_are_refused_together_are_counted_once_each(folder: Path) -> None:
    script = ScriptedScheduler()
    script.refusal = finish_pb2.Error(code=finish_pb2.ERROR_CODE_INTERNAL, message="no")
    async with scheduler(script), running(folder, script.address) as frontend:
        reply = await frontend.http.post("/v1/completions", json={"prompt": "x", "n": 3})
        metrics = await frontend.metrics()
    assert reply.status_code == 500
    assert metrics["vllm:request_success_total{finished_reason=error}"] == 1
    assert metrics["vllm:request_success_total{finished_reason=abort}"] == 2
    assert metrics["vllm:e2e_request_latency_seconds_count"] == 3
    assert metrics["quire_frontend_inflight_requests"] == 0
