"""Each call writes one log line with identity, outcome, token counts and times, and none of its text."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.services.frontend.access.access import Access
from quire.services.frontend.calls import calls
from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.grpc_edge.errors import call_context
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.shared.errors import InvalidArgument
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.common.v1.sampling_pb2 import SamplingParams
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import ASK, CALL, WEATHER, tool_model_folder, tool_server
from tests.waiting import eventually

SECRET = "hello world"
HEADERS = {"x-request-id": "mine", "x-tenant": "them"}
Lines = list[dict[str, Any]]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """Yields the fields of the log lines so far."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append({"message": record.getMessage(), **record.values})  # type: ignore[attr-defined]
            assert SECRET not in str(kept[-1])

    kept: Lines = []
    handler, logger = Keep(), logging.getLogger("quire.calls")
    caplog.set_level(logging.INFO, "quire.calls")
    logger.addHandler(handler)
    yield kept
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SECRET, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
    "/v1/responses": {"input": SECRET, "max_output_tokens": 4},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
    "/api/chat": {"messages": [{"role": "user", "content": SECRET}], "options": {"num_predict": 4}},
    "/generate": {"text": SECRET, "sampling_params": {"max_new_tokens": 4}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_over_http(folder: Path, lines: Lines, path: str, stream: bool) -> None:
    script = ScriptedScheduler(count_up)
    script.num_cached_tokens = 1
    async with scheduler(script), running(folder, script.address) as frontend:
        model = frontend.frontend.core.catalogue.name
        body = {**BODIES[path], "model": model, "stream": stream}
        reply = await frontend.http.post(path, json=body, headers=HEADERS)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-request-id"] == "mine"
        await eventually(lambda: lines)
    (line,) = lines
    assert (line["message"], line["request"], line["tenant"]) == ("request", "mine", "them")
    assert (line["route"], line["status"], line["finish"]) == (f"POST {path}", "200", "length")
    assert line["model"] == model
    assert (line["completion_tokens"], line["cached_tokens"]) == (4, 1)
    assert line["prompt_tokens"] == script.submissions[0].num_prompt_tokens
    assert line["queue_ms"] == 1.0
    assert 0 < line["first_token_ms"] <= line["total_ms"]


async def test_an_answer_over_grpc(folder: Path, lines: Lines) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        sampling = SamplingParams(n=3, max_tokens=4, stop_token_ids=[9], seed=8)
        request = pb.GenerateRequest(text=SECRET, sampling=sampling, options=pb.RequestOptions(request_id="mine"))
        async for _ in frontend.inference.Generate(request, metadata=[("x-tenant", "them")]):
            pass
        await frontend.until_idle()  # reported when the lease is released
        await frontend.inference.ListModels(pb.ListModelsRequest())
    first, second = lines
    assert (first["request"], first["tenant"], first["route"], first["status"]) == ("mine", "them", "Generate", "OK")
    assert first["finish"] == "stop,length"
    assert (second["route"], second["status"]) == ("ListModels", "OK")


async def test_disconnects_and_deadlines(folder: Path, lines: Lines) -> None:
    script = ScriptedScheduler(count_up, step_s=0.02)
    async with scheduler(script), running(folder, script.address) as frontend:
        long = pb.GenerateRequest(text="x", sampling=SamplingParams(max_tokens=500, ignore_eos=True))
        call = frontend.inference.Generate(long)
        await anext(aiter(call))
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in frontend.inference.Generate(long, timeout=3):
                pass
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
        async with frontend.http.stream("POST", "/v1/completions", json=body) as reply:
            await anext(reply.aiter_raw())
        await eventually(lambda: len(lines) >= 3)
    assert [(line["route"], line["finish"]) for line in lines] == [
        ("Generate", "cancelled"),
        ("Generate", "cancelled"),
        ("POST /v1/completions", "cancelled"),
    ]
    assert lines[2]["status"] == "200"
    assert all(0 < line["completion_tokens"] < 500 for line in lines)


async def test_what_is_wrong_is_named_by_its_field(folder: Path, lines: Lines) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        bad = {"prompt": SECRET, "temperature": -1, "request_id": "bad"}
        assert (await frontend.http.post("/v1/completions", json=bad)).status_code == 400
        assert (await frontend.http.post("/v1/completions", content=b"{")).status_code == 400
        wrong = {**BODIES["/v1/messages"], "max_tokens": "x"}
        assert (await frontend.http.post("/v1/messages", json=wrong)).status_code == 400
        assert (await frontend.http.post("/v1/chat/completions", json={})).status_code == 400
        assert (await frontend.http.get("/v1/nothing")).status_code == 404
        for path in ("/health", "/metrics", "/load"):
            assert (await frontend.http.get(path)).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(frontend.inference.Generate(pb.GenerateRequest(sampling=SamplingParams(n=1)))))
    told = [(line["route"], line["status"], line.get("error"), line.get("field")) for line in lines]
    assert told == [
        ("POST /v1/completions", "400", "InvalidArgument", "temperature"),
        ("POST /v1/completions", "400", "InvalidArgument", None),
        ("POST /v1/messages", "400", "InvalidArgument", "max_tokens"),
        ("POST /v1/chat/completions", "400", "InvalidArgument", "messages"),
        ("GET none", "404", None, None),
        ("Generate", "INVALID_ARGUMENT", "InvalidArgument", "prompt"),
    ]


@pytest.mark.parametrize(
    ("path", "names"),
    [("/v1/completions", ("model",)), ("/v1/completions", ("request_id", "tenant")), ("/api/chat", ("model",))],
)
async def test_a_very_long_name_is_not_copied(folder: Path, lines: Lines, path: str, names: tuple[str, ...]) -> None:
    """A very long name is copied neither into the log nor into the metrics."""
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        body = {**BODIES[path], **dict.fromkeys(names, "a" * 60_000)}
        assert (await frontend.http.post(path, json=body)).status_code in (400, 404)
        page = (await frontend.http.get("/metrics")).text
    assert len(str(lines)) < 2000
    assert max(map(len, page.splitlines())) < 2000


async def test_calls_that_do_not_get_past_the_interceptors_have_their_line_too(folder: Path, lines: Lines) -> None:
    script = ScriptedScheduler()
    settings: Any = {"api_key": "secret", "limits": {"max_tools": 2}}
    key = [("authorization", "Bearer secret")]
    many = pb.ChatRequest(tools=[pb.Tool(name="f")] * 3)
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        garbage = frontend.channel.unary_stream("/quire.inference.v1.InferenceService/Generate")
        for method, sent, metadata in (
            (frontend.inference.Chat, many, key),
            (garbage, b"\xff", key),
            (frontend.inference.Chat, many, []),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(aiter(method(sent, metadata=metadata)))
        counted = (await frontend.http.get("/metrics", headers={"authorization": "Bearer secret"})).text
    told = [(line["route"], line["status"], line.get("error"), line.get("field")) for line in lines]
    assert told == [
        ("Chat", "INVALID_ARGUMENT", "InvalidArgument", "tools"),
        ("Generate", "INVALID_ARGUMENT", "InvalidArgument", "message"),
        ("Chat", "UNAUTHENTICATED", None, None),
    ]
    for method, code in (("Chat", "INVALID_ARGUMENT"), ("Generate", "INVALID_ARGUMENT"), ("Chat", "UNAUTHENTICATED")):
        assert f'quire_frontend_grpc_requests_total{{code="{code}",method="{method}"}} 1.0' in counted


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_internal_error_is_logged_with_its_request_and_answered(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """The connection then serves the next call."""

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        with monkeypatch.context() as patch:
            patch.setattr(InputProcessor, "prepare", broken)
            body = {**BODIES[path], "model": frontend.frontend.core.catalogue.name, "stream": stream}
            reply = await frontend.http.post(path, json=body, headers=HEADERS)
            assert reply.status_code == 500
            assert "internal error" in reply.text
            request = pb.GenerateRequest(text="x", options=pb.RequestOptions(request_id="other"))
            with pytest.raises(grpc.aio.AioRpcError, match="internal error"):
                await anext(aiter(frontend.inference.Generate(request)))
        await frontend.until_idle()
        assert (await frontend.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    faults = [record for record in caplog.records if record.exc_info and record.exc_info[0] is ZeroDivisionError]
    assert [record.values["request"] for record in faults] == ["mine", "other"]  # type: ignore[attr-defined]


class NoMetadata:
    """The part of a call's context that call_context() reads."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("error", [InvalidArgument("wrong"), ZeroDivisionError("a fault of ours")])
async def test_an_error_is_sent_after_the_lease_is_released_and_the_call_is_logged(
    lines: Lines, error: Exception
) -> None:
    metrics, heard = FrontendMetrics("m", 100), list[tuple[int, list[str]]]()
    admission = CallAdmission(1, 1, 1, metrics)
    each = Calls(admission, Access((), metrics, time.monotonic), metrics.calls)

    async def end(*_: object) -> None:
        heard.append((admission.num_samples, [line["status"] for line in lines]))

    async with call_context("Generate", NoMetadata(), metrics, each, end) as call:  # type: ignore[arg-type]
        call.lease.acquire(1, 0)
        raise error
    assert heard == [(0, ["INVALID_ARGUMENT" if isinstance(error, InvalidArgument) else "INTERNAL"])]


async def test_many_refusals_are_logged_as_a_count(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SECOND_S", 0.05)
    metrics = FrontendMetrics("m", 100)
    each = Calls(CallAdmission(1, 1, 1, metrics), Access((), metrics, time.monotonic), metrics.calls)
    for _ in range(1000):
        each.log_refusal("POST /v1/completions", "429")
    assert len(lines) == calls.REFUSALS_A_SECOND
    await eventually(lambda: len(lines) != calls.REFUSALS_A_SECOND)
    assert lines[-1]["count"] == 1000 - calls.REFUSALS_A_SECOND
    each.log_refusal("POST /v1/completions", "429")
    assert lines[-1] == {"message": "request", "route": "POST /v1/completions", "status": "429"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "finish"), [("auto", "tool_calls"), (NAMED, "stop")])
async def test_the_finish_of_a_call_of_tools_is_that_of_the_answer(
    tools_folder: Path, lines: Lines, stream: bool, choice: Any, finish: str
) -> None:
    async with tool_server(tools_folder, CALL) as (frontend, _, _):
        body = {"messages": ASK, "tools": [WEATHER], "tool_choice": choice, "stream": stream}
        reply = await frontend.http.post("/v1/chat/completions", json=body)
        await eventually(lambda: lines)
    assert f'"finish_reason":"{finish}"' in reply.text.replace(": ", ":")
    assert lines[0]["finish"] == finish
