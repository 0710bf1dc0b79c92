"""Streams that continue without their client, at one frontend without Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from quire.client import Client
from quire.outputs import Delta
from quire.params import SamplingParams
from quire.requests import RequestOptions
from quire.services.frontend.composition.timing import FrontendTiming
from quire.shared.metrics.streams import ENDS, REFUSALS
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import SLOWLY_S, ScriptedScheduler, count_up, scheduler
from tests.services.frontend.streams.reading import (
    asked,
    attach,
    bare,
    everything,
    first,
    offsets,
    refusal,
    text,
    tokens,
)
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def script() -> AsyncIterator[ScriptedScheduler]:
    async with scheduler(ScriptedScheduler(count_up, step_s=SLOWLY_S)) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(folder: Path, script: ScriptedScheduler) -> AsyncIterator[Running]:
    async with running(folder, script.address) as started:
        yield started


async def test_what_is_attached_at_any_offset_is_the_rest_of_the_stream(frontend: Running) -> None:
    messages = await everything(frontend.inference.Generate(asked("offsets")))
    assert offsets(messages) == list(range(len(messages)))
    for offset in range(len(messages) + 2):
        assert await bare(attach(frontend, "offsets", offset)) == messages[offset:]


async def test_a_stream_continues_without_its_client(frontend: Running, script: ScriptedScheduler) -> None:
    whole = await everything(frontend.inference.Generate(asked("undisturbed")))
    script.pause()
    call = frontend.inference.Generate(asked("left"))
    await script.until(lambda: script.num_running)
    call.cancel()
    script.resume()
    found = await bare(attach(frontend, "left"))
    assert (tokens(found), text(found)) == (tokens(whole), text(whole))
    assert found[-1].finish_reason == finish_pb2.FINISH_REASON_LENGTH


async def test_several_readers_get_the_same_messages_each_at_its_own_pace(frontend: Running) -> None:
    begun = await first(frontend.inference.Generate(asked("several")), 2)
    slow = attach(frontend, "several", 1)
    fast = await asyncio.gather(*(bare(attach(frontend, "several")) for _ in range(3)))
    assert fast[0] == fast[1] == fast[2]
    assert fast[0][:2] == begun
    assert await bare(slow) == fast[0][1:]


async def test_an_answer_of_chat_is_taken_up_as_well(frontend: Running) -> None:
    said = [pb.ChatMessage(role="user", content="hi")]
    options = pb.RequestOptions(request_id="chat")
    chat = pb.ChatRequest(messages=said, options=options, resumable=True)
    chat.sampling.CopyFrom(asked("").sampling)
    messages = await everything(frontend.inference.Chat(chat))
    assert await bare(attach(frontend, "chat", 3)) == messages[3:]


async def test_the_python_client_takes_a_stream_up(frontend: Running) -> None:
    """From any thread; it can also cancel it."""

    def attached() -> list[Delta]:
        with Client(frontend.frontend.grpc_address) as client:
            options = RequestOptions(request_id="python", resumable=True, retention_s=60)
            for delta in client.stream("hello", SamplingParams(max_tokens=400, ignore_eos=True), options):
                assert delta.offset == 0
                break
            client.cancel("python")
            return [*client.attach("python", 1)]

    deltas = await asyncio.to_thread(attached)
    assert [delta.offset for delta in deltas] == list(range(1, len(deltas) + 1))
    assert deltas[-1].finish_reason == "cancelled"


async def test_the_stream_of_another_tenant_is_not_there(frontend: Running) -> None:
    await first(frontend.inference.Generate(asked("mine", tenant="a")), 1)
    for tenant in ("", "b"):
        refused = await refusal(attach(frontend, "mine", tenant=tenant))
        assert refused.code() == grpc.StatusCode.NOT_FOUND
        assert "'mine'" in (refused.details() or "")
        cancel = frontend.inference.Cancel(pb.CancelRequest(request_id="mine", tenant=tenant))
        assert (await refusal(cancel)).code() == grpc.StatusCode.NOT_FOUND
    assert await bare(attach(frontend, "mine", tenant="a"))
    by_metadata = frontend.inference.Attach(pb.AttachRequest(request_id="mine"), metadata=(("x-tenant", "a"),))
    assert await bare(by_metadata)


async def test_a_cancelled_stream_ends_for_all_its_readers(frontend: Running, script: ScriptedScheduler) -> None:
    begun = await first(frontend.inference.Generate(asked("cancelled", n=2, max_tokens=400)), 1)
    readers = [asyncio.create_task(bare(attach(frontend, "cancelled"))) for _ in range(2)]
    await frontend.inference.Cancel(pb.CancelRequest(request_id="cancelled"))
    messages, others = await asyncio.gather(*readers)
    ends = {message.index: message.finish_reason for message in messages if message.finish_reason}
    assert ends == dict.fromkeys(range(2), finish_pb2.FINISH_REASON_CANCELLED)
    assert len(tokens(messages)) < 800
    assert messages == others
    assert messages[:1] == begun
    await script.until(lambda: not script.num_running)
    assert await bare(attach(frontend, "cancelled")) == messages


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"retention_s": 301}, grpc.StatusCode.INVALID_ARGUMENT, "retention_s must be at most stream_retention_s=300"),
        ({"retention_s": -1}, grpc.StatusCode.INVALID_ARGUMENT, "got -1"),
        ({"options": {"final_only": True}}, grpc.StatusCode.INVALID_ARGUMENT, "requires stream=true"),
        ({"sampling": {"beam_search": {"width": 2}}}, grpc.StatusCode.INVALID_ARGUMENT, "beam_search"),
        ({"options": {"request_id": "taken"}}, grpc.StatusCode.FAILED_PRECONDITION, "'taken'"),
        ({"sampling": {"temperature": -1}}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    ],
)
async def test_what_cannot_be_kept_is_refused(
    frontend: Running, change: dict[str, Any], code: grpc.StatusCode, told: str
) -> None:
    if change.get("options", {}).get("request_id"):
        await first(frontend.inference.Generate(asked("taken")), 1)
    request = asked("refused")
    request.MergeFrom(pb.GenerateRequest(**change))
    refused = await refusal(frontend.inference.Generate(request))
    assert (refused.code(), told in (refused.details() or "")) == (code, True), refused.details()
    assert (await refusal(attach(frontend, "refused"))).code() == grpc.StatusCode.NOT_FOUND


async def test_a_server_that_keeps_none_says_so(folder: Path, script: ScriptedScheduler) -> None:
    async with running(folder, script.address, stream_retention_s=0) as frontend:
        for call, field in (
            (frontend.inference.Generate(asked("none")), "resumable"),
            (attach(frontend, "none"), "request_id"),
            (frontend.inference.Cancel(pb.CancelRequest(request_id="none")), "request_id"),
        ):
            refused = await refusal(call)
            assert refused.code() == grpc.StatusCode.UNIMPLEMENTED
            assert (refused.details() or "").startswith(f"{field}: this server keeps no streams")


class Clock:
    """A clock that only moves when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(folder: Path, script: ScriptedScheduler, clock: Clock) -> AsyncIterator[Running]:
    limits, timing = {"messages": 100, "bytes": 20_000, "per_tenant": 2}, FrontendTiming(stream_clock=clock)
    async with running(folder, script.address, stream_limits=limits, stream_retention_s=50, timing=timing) as started:
        yield started


@pytest.mark.parametrize(("bound", "sampling"), [("messages=100", {}), ("bytes=20000", {"logprobs": 20})])
async def test_a_stream_that_outgrows_its_bounds_ends(
    strict: Running, script: ScriptedScheduler, bound: str, sampling: dict[str, Any]
) -> None:
    refused = await refusal(strict.inference.Generate(asked("long", tenant=bound, max_tokens=400, **sampling)))
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert bound in (refused.details() or "")
    await script.until(lambda: not script.num_running)
    assert bound in ((await refusal(attach(strict, "long", tenant=bound))).details() or "")


async def test_the_streams_of_a_tenant_are_limited(strict: Running) -> None:
    for number in range(2):
        await first(strict.inference.Generate(asked(str(number), tenant="t")), 1)
    refused = await refusal(strict.inference.Generate(asked("2", tenant="t")))
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "per_tenant=2" in (refused.details() or "")
    assert await everything(strict.inference.Generate(asked("2", tenant="other")))


async def test_the_streams_of_all_tenants_are_limited(folder: Path, script: ScriptedScheduler) -> None:
    async with running(folder, script.address, stream_limits={"all_tenants": 2}) as strict:
        for tenant in ("t", "u"):
            assert await everything(strict.inference.Generate(asked("kept", tenant=tenant)))
        refused = await refusal(strict.inference.Generate(asked("kept", tenant="v")))
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "all_tenants=2" in (refused.details() or "")


async def test_the_memory_of_a_stream_is_that_of_its_request_as_well(folder: Path, script: ScriptedScheduler) -> None:
    async with running(folder, script.address, stream_limits={"frontend_bytes": 700}) as strict:
        large = asked("large", max_tokens=1)
        large.token_ids.ids[:] = [300] * 400
        assert await everything(strict.inference.Generate(large))
        held = (await strict.metrics())["quire_frontend_stream_bytes"]
        assert held > 700
        refused = await refusal(strict.inference.Generate(asked("next", max_tokens=1)))
    assert f"frontend_bytes=700, its streams use {held:.0f}" in (refused.details() or "")


async def test_an_unread_stream_ends_and_is_dropped_after_its_retention(
    strict: Running, script: ScriptedScheduler, clock: Clock
) -> None:
    streams = strict.frontend.core.streams
    script.pause()
    call = strict.inference.Generate(asked("unread", tenant="reader", max_tokens=90))
    await script.until(lambda: script.num_running)
    clock.now += 1000
    await streams.heartbeat()
    script.resume()
    await call.read()
    script.pause()
    call.cancel()
    await eventually(lambda: not any(stream.num_readers for stream in streams.known.values()))
    clock.now += 49
    await streams.heartbeat()
    assert script.num_running, "a client may still follow the stream"
    clock.now += 1
    await streams.heartbeat()
    script.resume()
    await script.until(lambda: not script.num_running)
    found = await bare(attach(strict, "unread", tenant="reader"))
    assert found[-1].finish_reason == finish_pb2.FINISH_REASON_CANCELLED
    clock.now += 49
    await streams.heartbeat()
    assert await bare(attach(strict, "unread", tenant="reader")) == found
    clock.now += 50
    await streams.heartbeat()
    assert (await refusal(attach(strict, "unread", tenant="reader"))).code() == grpc.StatusCode.NOT_FOUND


async def test_the_page_counts_how_streams_end_and_why_they_are_refused(
    folder: Path, script: ScriptedScheduler
) -> None:
    """Errors of the request itself are counted elsewhere."""
    limits = {"per_tenant": 3, "messages": 100}
    async with running(folder, script.address, stream_limits=limits) as strict:
        for name, max_tokens in (("good", 3), ("long", 400)):
            call = strict.inference.Generate(asked(name, max_tokens=max_tokens))
            await (refusal(call) if max_tokens > 100 else everything(call))
        await first(strict.inference.Generate(asked("ended", max_tokens=90)), 1)
        script.pause()
        told = await strict.metrics()
        assert told["quire_frontend_streams_made"] == 1
        await strict.inference.Cancel(pb.CancelRequest(request_id="ended"))
        script.resume()
        await bare(attach(strict, "ended"))
        for call in (
            strict.inference.Generate(asked("good", max_tokens=3)),
            strict.inference.Generate(asked("full", max_tokens=3)),
            attach(strict, "none"),
            strict.inference.Generate(asked("wrong", temperature=-1, tenant="b")),
        ):
            await refusal(call)
        found = await strict.metrics()
    ended = {key: found[f"quire_frontend_streams_ended_total{{reason={key}}}"] for key in ENDS}
    assert ended == {"finished": 1, "failed": 1, "cancelled": 1, "unread": 0, "elsewhere": 0}
    refused = {key: found[f"quire_frontend_streams_refused_total{{reason={key}}}"] for key in REFUSALS}
    assert refused == {"taken": 1, "full": 1, "not_found": 1, "redis_away": 0}
    assert found["quire_frontend_streams_begun_total"] == 3


async def test_a_stream_whose_client_left_while_it_began_is_counted(
    folder: Path, script: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream continues, so it counts as started, like every ended one."""
    begins, may_begin = asyncio.Event(), asyncio.Event()

    async def create(*_: Any, **__: Any) -> None:
        begins.set()
        await may_begin.wait()

    async with running(folder, script.address) as frontend:
        streams = frontend.frontend.core.streams
        monkeypatch.setattr(streams.store, "create", create)
        call = frontend.inference.Generate(asked("left"))
        await asyncio.wait_for(begins.wait(), 60)
        call.cancel()
        await eventually(frontend.metrics, lambda found: "code=CANCELLED" in "".join(found))
        may_begin.set()
        found = await eventually(
            frontend.metrics, lambda found: found["quire_frontend_streams_ended_total{reason=finished}"] != 0
        )
    assert found["quire_frontend_streams_begun_total"] == 1
    assert found["quire_frontend_streams_made"] == 0


async def test_the_page_counts_a_call_once_and_its_tokens_once(frontend: Running) -> None:
    await frontend.until_idle()
    before = await frontend.metrics()
    await everything(frontend.inference.Generate(asked("counted", tenant="counted")))
    await bare(attach(frontend, "counted", tenant="counted"))
    await frontend.until_idle()
    found = await frontend.metrics()
    changed = {name: value - before.get(name, 0) for name, value in found.items()}
    assert changed["quire_frontend_streams"] == 1
    assert changed["quire_frontend_streams_begun_total"] == 1
    assert changed["quire_frontend_streams_ended_total{reason=finished}"] == 1
    assert changed["quire_frontend_stream_bytes"] > 24
    assert (found["quire_frontend_streams_made"], found["quire_frontend_stream_readers"]) == (0, 0)
    assert changed["quire_frontend_stream_attaches_total"] == 1
    assert changed["vllm:generation_tokens_total"] == 24
    assert changed["quire_frontend_grpc_requests_total{code=OK,method=Generate}"] == 1
    assert found["quire_frontend_tenant_calls_total{outcome=answered,tenant=counted}"] == 1
    assert found["quire_frontend_tenant_tokens_total{kind=output,tenant=counted}"] == 24
