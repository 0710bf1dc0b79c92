"""Tests that after a fault anywhere in a request's handling, its client gets an end and nothing is leaked.

`QUIRE_FAULTS=all` tries every function call of the handling; otherwise a fixed random sample of them.
"""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import quire.services.frontend
from quire.services.frontend.composition.timing import FrontendTiming
from quire.services.frontend.scheduler_client import connection
from quire.services.frontend.scheduler_client.connection import ConnectionTiming
from quire.services.frontend.web_edge.framing import frame
from quire.shared.pb.common.v1.sampling_pb2 import BeamSearch, SamplingParams, StructuredOutput
from quire.shared.pb.dialects import open_inference_pb2 as tensors
from quire.shared.pb.dialects import vllm_engine_pb2 as engine
from quire.shared.pb.dialects.open_inference_pb2_grpc import GRPCInferenceServiceStub
from quire.shared.pb.dialects.vllm_engine_pb2_grpc import VllmEngineStub
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.faults import Faults
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually, loop_turns

pytestmark = [
    pytest.mark.timeout(7200 if os.environ.get("QUIRE_FAULTS") == "all" else 600),
    # A fault between a coroutine and its task.
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TRIES, MORE_TRIES = 10, 30
PATIENCE_S = 60.0
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Functions that the others rely on: they release resources, and report the end to the reader.
GIVES_BACK = frozenset(
    {
        "Lease.release",
        "Lease.__exit__",
        "CallAdmission.add",
        "TenantLimit.add",
        "Call.__exit__",
        "Generation.__exit__",
        "Generation._close",
        "Generation._is_late",
        "Generation._fail",
        "SchedulerClient.cancel",
        "SchedulerClient._fail",
        "Session.cancel",
        "Session._forget_backlog",
        "Session._send_cancellation",
        "PendingQueue.remove",
        "PendingQueue._end",
        "Mailbox.fail",
        "Mailbox.wake",
        "Mailbox.close",
        "Sample._end",
        "Sample.on_end",
        "Generation.on_done",
        "WakeupPacer.reader_done",
        "WakeupPacer._begin",
        "WakeupPacer._end",
        "WakeupPacer._schedule_round",
        "SmallestFirstLimiter.slot",
        "SmallestFirstLimiter._release",
    }
)
# Not part of a request's handling: the session itself, the process, and connections, which hold nothing of a request.
ELSEWHERE = (
    "/connection.py",
    "/connections.py",
    "/main.py",
    "/composition/",
    "/directory/",
    "/http/server/protocol.py",
)

Ask = Callable[[Running], Awaitable[bool]]  # returns whether the call was answered completely


def over_http(path: str, body: dict[str, Any]) -> Ask:
    async def ask(frontend: Running) -> bool:
        named = {"model": frontend.frontend.core.catalogue.name} if path == "/v1/messages" else {}
        try:
            reply = await frontend.http.post(path, json={**named, **body})
        except httpx.TransportError:
            return False  # a closed connection is an end
        if reply.status_code == 200 and body.get("stream"):
            text = reply.text
            assert any(end in text for end in ("[DONE]", "error", "message_stop", "response.completed")), text
        return reply.status_code == 200

    return ask


def over_grpc(message: pb.GenerateRequest | pb.ChatRequest, **options: Any) -> Ask:
    async def ask(frontend: Running) -> bool:
        stub = frontend.inference
        method = stub.Generate if isinstance(message, pb.GenerateRequest) else stub.Chat
        finished = set()
        try:
            async for delta in method(message, **options):
                if delta.finish_reason:
                    assert delta.index not in finished, "one end for each"
                    finished.add(delta.index)
        except grpc.aio.AioRpcError:
            return False
        assert len(finished) == (message.sampling.n or 1)
        return True

    return ask


def as_tensors(*, stream: bool) -> Ask:
    message = tensors.ModelInferRequest(id="mine")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    message.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(stream)
    message.parameters["max_tokens"].int64_param = 4
    message.parameters["n"].int64_param = 2

    async def ask(frontend: Running) -> bool:
        stub = GRPCInferenceServiceStub(frontend.channel)
        try:
            if not stream:
                return bool((await stub.ModelInfer(message)).outputs)
            answers = [answer async for answer in stub.ModelStreamInfer(iter([message]))]
        except grpc.aio.AioRpcError:
            return False
        ends = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers]
        assert sum(ends) == 1, "one end"
        return not any(answer.error_message for answer in answers)

    return ask


def as_engine(*, stream: bool) -> Ask:
    sampling = engine.SamplingParams(max_tokens=4, n=2, logprobs=1)
    message = engine.GenerateRequest(text="hello", sampling_params=sampling, stream=stream)

    async def ask(frontend: Running) -> bool:
        try:
            answers = [answer async for answer in VllmEngineStub(frontend.channel).Generate(message)]
        except grpc.aio.AioRpcError:
            return False
        ends = [answer.complete.index for answer in answers if answer.HasField("complete")]
        assert sorted(ends) == [0, 1], "one end for each"
        return True

    return ask


def over_the_web(kind: str, message: pb.GenerateRequest) -> Ask:
    """Returns a call over Connect or gRPC-Web; `kind`: a content type."""
    body = frame(0, message.SerializeToString())

    async def ask(frontend: Running) -> bool:
        path, headers = "/quire.inference.v1.InferenceService/Generate", {"content-type": kind}
        try:
            reply = await frontend.http.post(path, content=body, headers=headers)
        except httpx.TransportError:
            return False  # a closed connection is an end
        if reply.status_code != 200:
            return False
        ends = [ending in reply.content for ending in (b"\x02\0\0\0\x02{}", b"grpc-status: 0")]
        assert any(ends) or b"error" in reply.content or b"grpc-status" in reply.content
        return any(ends)

    return ask


SAMPLING = SamplingParams(max_tokens=6, n=2, seed=3, logprobs=1, stop=["zzz"], ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hello"}]
CONSTRAINT = StructuredOutput(regex="[a-z]{1,5}")
SEARCH = SamplingParams(max_tokens=4, n=2, beam_search=BeamSearch(width=2))
CHAT = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hello")], sampling=SamplingParams(max_tokens=4))
CALL_KINDS: dict[str, Ask] = {
    "completions": over_http("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "logprobs": 1}),
    "completions, streamed": over_http("/v1/completions", {"prompt": "a", "n": 3, "max_tokens": 5, "stream": True}),
    "chat": over_http("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "n": 2}),
    "chat, streamed": over_http("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "stream": True}),
    "responses": over_http("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    "responses, streamed": over_http("/v1/responses", {"input": "hello", "max_output_tokens": 4, "stream": True}),
    "messages": over_http("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    "ollama": over_http("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 4}}),
    "sglang": over_http("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 4}, "stream": True}),
    "messages, streamed": over_http("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "stream": True}),
    "Generate": over_grpc(pb.GenerateRequest(text="hello", sampling=SAMPLING), timeout=60),
    "Generate, a form": over_grpc(
        pb.GenerateRequest(text="x", sampling=SamplingParams(max_tokens=3, structured_output=CONSTRAINT))
    ),
    "Generate, a search": over_grpc(pb.GenerateRequest(text="x", sampling=SEARCH)),
    "Chat": over_grpc(CHAT),
    "tensors": as_tensors(stream=False),
    "tensors, streamed": as_tensors(stream=True),
    "engine": as_engine(stream=False),
    "engine, streamed": as_engine(stream=True),
    "Connect": over_the_web("application/connect+proto", pb.GenerateRequest(text="x", sampling=SAMPLING)),
    "gRPC-Web": over_the_web("application/grpc-web", pb.GenerateRequest(text="x", sampling=SAMPLING)),
}

OTHER_INTERFACES = ("tensors", "engine", "Connect", "gRPC-Web")  # for interfaces whose handling the others test already
NAMES = [
    pytest.param(call_kind, marks=pytest.mark.slow) if call_kind in OTHER_INTERFACES else call_kind
    for call_kind in CALL_KINDS
]


@pytest.fixture(autouse=True)
def no_logging() -> Iterator[None]:
    """Disables logging, since thousands of tracebacks are no help."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# Without growing reconnect pauses, which would add up to hours: faults that end the session follow one another.
SHORT_PAUSES = FrontendTiming(connections=ConnectionTiming(longest_pause_s=connection.FIRST_PAUSE_S))
SETTINGS: dict[str, Any] = {"max_inflight_requests": 64, "timing": SHORT_PAUSES}


def leaked(frontend: Running) -> dict[str, Any]:
    """Returns the non-zero numbers of resources held for requests, by kind."""
    parts = frontend.frontend
    client, admission = parts.core.client, parts.ingress.admission
    sessions = client.sessions
    pace = parts.core.generator.pace
    held = {
        "places": admission.num_samples,
        "tokens": admission.num_tokens,
        "live": sum(len(session.live) for session in sessions),
        "load": sum(session.num_tokens_since_view for session in sessions),
        "waiting": len(client.pending) + client.pending.num_sequences,
        "refused": len(client.retrying) + client.retrying.num_sequences,
        "writing": pace.num_writing + len(pace.waiting),
        "turns": parts.ingress.calls.preparation_queue.num_waiting,
    }
    return {kind: number for kind, number in held.items() if number}


async def until_nothing_is_leaked(script: ScriptedScheduler, frontend: Running, where: str) -> None:
    try:
        await eventually(lambda: not leaked(frontend) and (not script.num_running) and frontend.num_usable_sessions)
    except TimeoutError:
        raise AssertionError(f"{leaked(frontend)}, {script.num_running} run, after a fault at {where}") from None


def test_functions_that_others_rely_on_exist() -> None:
    """A renamed function would be disturbed, and a resource that it gives back would be lost."""
    folder = Path(quire.services.frontend.__file__).parent
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {f"{each.name}.{part.name}" for each in classes for part in each.body if isinstance(part, FUNCTIONS)}
    assert names >= GIVES_BACK


@pytest.mark.parametrize("tries", [TRIES, pytest.param(MORE_TRIES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call_kind", NAMES)
async def test_faults_at_any_point_leak_no_resources(folder: Path, call_kind: str, tries: int) -> None:
    faults = Faults((Path(quire.services.frontend.__file__).parent,), not_in=GIVES_BACK, not_under=ELSEWHERE)
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, **SETTINGS) as frontend,
    ):
        assert await CALL_KINDS[call_kind](frontend), "undisturbed it is answered"
        with faults.at(0):
            await CALL_KINDS[call_kind](frontend)
        numbers = range(1, faults.num_calls + 1)
        assert len(numbers) > 50
        if os.environ.get("QUIRE_FAULTS") != "all":
            numbers = sorted(random.Random(call_kind).sample(numbers, tries))
        for number in numbers:
            with faults.at(number):
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await CALL_KINDS[call_kind](frontend)
                except TimeoutError:
                    raise AssertionError(f"no end after a fault at {faults.where}") from None
            await until_nothing_is_leaked(script, frontend, faults.where)
        assert await CALL_KINDS[call_kind](frontend), "as before"


@pytest.mark.parametrize("call_kind", NAMES)
async def test_disconnects_at_any_time_leak_no_resources(folder: Path, call_kind: str) -> None:
    """Disconnects after each number of turns of the event loop: before the headers, during the body, after the end."""
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, **SETTINGS) as frontend,
    ):
        stay = 0
        while stay < 400:
            asking = asyncio.create_task(CALL_KINDS[call_kind](frontend))  # type: ignore[arg-type]
            await loop_turns(stay)
            if asking.done():
                break
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until_nothing_is_leaked(script, frontend, f"turn {stay}")
            stay += 1 + stay // 8
        await CALL_KINDS[call_kind](frontend)
    assert stay > 10


async def test_deadlines_at_any_time_leak_no_resources(folder: Path) -> None:
    message = pb.GenerateRequest(text="x", sampling=SamplingParams(n=2, max_tokens=300, ignore_eos=True))
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, **SETTINGS) as frontend,
    ):
        for milliseconds in (1, 2, 3, 5, 8, 13, 21, 34, 55):
            with pytest.raises(grpc.aio.AioRpcError) as late:
                async for _ in frontend.inference.Generate(message, timeout=milliseconds / 1000):
                    pass
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            headers = {"x-request-timeout": str(milliseconds / 1000)}
            body = {"prompt": "x", "n": 2, "max_tokens": 300, "ignore_eos": True}
            assert (await frontend.http.post("/v1/completions", json=body, headers=headers)).status_code == 504
            await until_nothing_is_leaked(script, frontend, f"{milliseconds} ms")
