"""JSON inside of strings, over every edge: an error is a client error and names the field."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status.rpc_status import from_call

from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

WRONG = {
    "half of a pair": ('{"a": [{"b": "x\\ud83d"}]}', "a[0].b contains \\ud83d, half of a surrogate pair"),
    "half of a pair in a name": ('{"\\udc00": 1}', "\\udc00 contains \\udc00, half of a surrogate pair"),
    "too many digits": ('{"a": ' + "1" * 5000 + "}", "4300 digits"),
    "no number": ('{"a": NaN}', "NaN is not JSON"),
    "no JSON": ("{", "Expecting"),
}
DEEP = ("[" * 60_000 + "]" * 60_000, "nested")
OF_CALLS = {"chat", "responses", "tokenize", "arguments"}  # a tool call of the model, which may be truncated
HELLO = pb.ChatMessage(role="user", content="hi")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tool_model_folder(tmp_path_factory.mktemp("models") / "talking")
    async with scheduler(ScriptedScheduler(count_up)) as script, running(folder, script.address) as started:
        yield started


def bodies(written: str) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Returns, by the field that holds `written`: path, field named by the error, body."""
    function = {"name": "f", "arguments": written}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    said = {"role": "user", "content": "hi"}
    item = {"type": "function_call", "call_id": "1", **function}
    prompt = {"prompt": "x", "max_tokens": 1}
    return {
        "chat": ("/v1/chat/completions", "messages", {"messages": [said, call]}),
        "responses": (
            "/v1/responses",
            "input",
            {"input": [said, item]},
        ),
        "tokenize": ("/tokenize", "messages", {"messages": [said, call]}),
        "schema": ("/v1/completions", "structured_outputs", {**prompt, "structured_outputs": {"json": written}}),
        "tag": ("/v1/completions", "structured_outputs", {**prompt, "structured_outputs": {"structural_tag": written}}),
        "guided": ("/v1/completions", "guided_json", {**prompt, "guided_json": written}),
    }


def cases(holders: Iterable[str]) -> list[Any]:
    """Returns for each holder the written text and the expected error."""
    wrong = {**WRONG, "too deep": DEEP}
    pairs = [(holder, name) for holder in holders for name in wrong if name != "no JSON" or holder not in OF_CALLS]
    return [pytest.param(holder, *wrong[name], id=f"{name}-{holder}") for holder, name in pairs]


@pytest.mark.parametrize(("holder", "written", "text"), cases(bodies("")))
async def test_over_http(frontend: Running, holder: str, written: str, text: str) -> None:
    path, field, body = bodies(written)[holder]
    answer = await frontend.http.post(path, content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], text in error["message"]) == (field, True), error


def messages(written: str) -> dict[str, tuple[str, str, Any]]:
    """Returns, by the field that holds `written`: method, field named by the error, message."""
    tool = pb.Tool(name="f", parameters=written)
    call = pb.ToolCall(id="1", name="f", arguments=written)
    called = [HELLO, pb.ChatMessage(role="assistant", tool_calls=[call])]
    form = sampling_pb2.SamplingParams(structured_output=sampling_pb2.StructuredOutput(json_schema=written))
    tag = sampling_pb2.SamplingParams(structured_output=sampling_pb2.StructuredOutput(structural_tag=written))
    return {
        "tool": ("Chat", "tools", pb.ChatRequest(messages=[HELLO], tools=[tool])),
        "arguments": ("Chat", "messages", pb.ChatRequest(messages=called)),
        "variables": (
            "Chat",
            "chat_template_kwargs",
            pb.ChatRequest(messages=[HELLO], chat_template_kwargs=written),
        ),
        "schema": ("Chat", "structured_output", pb.ChatRequest(messages=[HELLO], sampling=form)),
        "tag": ("Generate", "structured_output", pb.GenerateRequest(text="x", sampling=tag)),
        "conversation": (
            "Tokenize",
            "tools",
            pb.TokenizeRequest(conversation=pb.Conversation(messages=[HELLO], tools=[tool])),
        ),
    }


@pytest.mark.parametrize(("holder", "written", "text"), cases(messages("")))
async def test_over_grpc(frontend: Running, holder: str, written: str, text: str) -> None:
    method, field, message = messages(written)[holder]
    code, told, fields = await refusal(getattr(frontend.inference, method)(message))
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert text in told


async def test_arguments_of_a_call_that_was_cut_off_are_text(frontend: Running) -> None:
    written, _ = WRONG["no JSON"]
    for path, _, body in (bodies(written)[holder] for holder in bodies("") if holder in OF_CALLS):
        answer = await frontend.http.post(path, content=json.dumps(body))
        assert answer.status_code == 200, answer.text
    answers = [answer async for answer in frontend.inference.Chat(messages(written)["arguments"][2])]
    assert answers[-1].finish_reason, answers[-1]


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, list[str]]:
    """Returns code, text and named fields of the error."""
    streams = isinstance(call, grpc.aio.UnaryStreamCall)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (anext(aiter(call)) if streams else call)
    status = from_call(raised.value)
    found: list[str] = []
    for packed in status.details if status is not None else ():
        bad = error_details_pb2.BadRequest()
        if packed.Unpack(bad):
            found += [violation.field for violation in bad.field_violations]
    return raised.value.code(), raised.value.details() or "", found


@pytest.mark.parametrize("method", ["Generate", "Chat", "Tokenize", "Detokenize", "ListModels", "GetModel"])
async def test_bytes_that_are_no_message_have_a_code_and_a_field(frontend: Running, method: str) -> None:
    path = f"/quire.inference.v1.InferenceService/{method}"
    make = frontend.channel.unary_stream if method in ("Generate", "Chat") else frontend.channel.unary_unary
    half_a_character = [] if method == "ListModels" else [b"\x0a\x02\xed\xa0"]  # in a field of text
    for data in (b"\xff", b"\x0a\xff", b"\x0b" * 40, bytes(range(255, 200, -1)), *half_a_character):
        code, told, fields = await refusal(make(path)(data))
        assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["message"])
        assert "the message is not a quire.inference.v1." in told
