"""The open inference protocol over gRPC, with texts as tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from quire.shared.pb.dialects import open_inference_pb2 as pb
from quire.shared.pb.dialects import open_inference_pb2_grpc
from quire.shared.version import VERSION
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_replies import replying
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "talking"
BYTES, BOOL = "BYTES", "BOOL"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Running, ScriptedScheduler]]:
    folder = tool_model_folder(tmp_path_factory.mktemp("models") / MODEL)
    script = ScriptedScheduler(replying(folder, "It is sunny."), max_model_len=4096)
    async with scheduler(script), running(folder, script.address) as frontend:
        frontend.write_each_token(script)
        yield frontend, script


@pytest.fixture(scope="module")
def frontend(served: tuple[Running, ScriptedScheduler]) -> Running:
    return served[0]


@pytest.fixture(scope="module")
def stub(frontend: Running) -> Any:
    return open_inference_pb2_grpc.GRPCInferenceServiceStub(frontend.channel)


def infer(text: str | bytes | None = "Hm?", *, is_raw: bool = False, **inputs: Any) -> pb.ModelInferRequest:
    """Returns a request. `inputs`: by name, booleans or texts."""
    message = pb.ModelInferRequest(model_name=MODEL, id="mine")
    given = ({} if text is None else {"text_input": text}) | inputs
    for name, value in given.items():
        is_bool = isinstance(value, bool)
        tensor = message.inputs.add(name=name, datatype=BOOL if is_bool else BYTES, shape=[1])
        content = value.encode() if isinstance(value, str) else value
        if is_raw:
            raw = bytes([value]) if is_bool else struct.pack("<I", len(content)) + content
            message.raw_input_contents.append(raw)
        elif is_bool:
            tensor.contents.bool_contents.append(value)
        else:
            tensor.contents.bytes_contents.append(content)
    return message


def outputs(response: pb.ModelInferResponse) -> dict[str, list[Any]]:
    found = {}
    for tensor in response.outputs:
        [(_, values)] = tensor.contents.ListFields()
        found[tensor.name] = list(values)
        assert list(tensor.shape) == [len(values)]
    return found


async def streamed(stub: Any, messages: Iterable[pb.ModelInferRequest]) -> list[pb.ModelStreamInferResponse]:
    return [response async for response in stub.ModelStreamInfer(iter(messages))]


def text_of(responses: Iterable[pb.ModelStreamInferResponse], request_id: str = "mine") -> str:
    told = (one.infer_response for one in responses if one.infer_response.id == request_id)
    return b"".join(outputs(answer)["text_output"][0] for answer in told).decode()


async def noted(call: Any, heard: list[Any]) -> None:
    """Collects the answers until the call ends or fails."""
    async for response in call:
        heard.append(response)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code(), str(failed.value.details())


async def test_server_and_model_metadata(frontend: Running, stub: Any) -> None:
    server = await stub.ServerMetadata(pb.ServerMetadataRequest())
    model = await stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL))
    assert (server.name, server.version) == ("quire", VERSION)
    assert (model.name, list(model.versions)) == (MODEL, ["1"])
    assert {one.name: one.datatype for one in model.inputs}["text_input"] == BYTES
    assert {one.name: list(one.shape) for one in model.outputs}["text_output"] == [-1]
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready


async def test_models_that_are_not_there_are_not_ready(stub: Any) -> None:
    ready = [await stub.ModelReady(pb.ModelReadyRequest(name=name)) for name in (MODEL, "", "other")]
    assert [one.ready for one in ready] == [True, True, False]
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name=MODEL, version="2"))).ready
    with pytest.raises(grpc.aio.AioRpcError, match="the version '2' does not exist"):
        await stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL, version="2"))
    assert (await refused(stub.ModelMetadata(pb.ModelMetadataRequest(name="other"))))[0] is grpc.StatusCode.NOT_FOUND


async def test_a_text_is_returned_with_or_without_the_prompt(stub: Any) -> None:
    whole = await stub.ModelInfer(infer("Hm? "))
    alone = await stub.ModelInfer(infer("Hm? ", exclude_input_in_output=True))
    assert outputs(whole) == {"text_output": [b"Hm? It is sunny."]}
    assert outputs(alone) == {"text_output": [b"It is sunny."]}
    assert (whole.model_name, whole.model_version, whole.id) == (MODEL, "1", "mine")


async def test_raw_tensors_are_answered_raw(stub: Any) -> None:
    message = infer("Hm?", is_raw=True, exclude_input_in_output=True, return_num_output_tokens=True)
    answer = await stub.ModelInfer(message)
    text, count = answer.raw_output_contents
    assert text == struct.pack("<I", 12) + b"It is sunny."
    assert struct.unpack("<I", count)[0] > 2
    assert [(one.name, one.datatype) for one in answer.outputs] == [
        ("text_output", BYTES),
        ("num_output_tokens", "UINT32"),
    ]


async def test_sampling_parameters_come_as_a_tensor_or_as_parameters(
    served: tuple[Running, ScriptedScheduler], stub: Any
) -> None:
    script = served[1]
    written = json.dumps({"temperature": "0.5", "top_k": 7, "max_tokens": 2, "stop": ["sun"]})
    first = await stub.ModelInfer(infer(sampling_parameters=written, exclude_input_in_output=True))
    message = infer(exclude_input_in_output=True)
    message.parameters["max_tokens"].int64_param = 3
    message.parameters["temperature"].double_param = 0.25
    await stub.ModelInfer(message)
    by_tensor, by_parameters = script.submissions[-2:]
    assert (by_tensor.sampling.top_k, by_tensor.max_tokens) == (7, 2)
    assert by_tensor.sampling.temperature == 0.5
    assert (by_parameters.sampling.temperature, by_parameters.max_tokens) == (0.25, 3)
    assert b"sun" not in outputs(first)["text_output"][0]


async def test_optional_outputs_are_returned_on_request(stub: Any) -> None:
    wanted = (
        "return_finish_reason",
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
    )
    asked = dict.fromkeys(wanted, True)
    told = outputs(await stub.ModelInfer(infer(sampling_parameters='{"logprobs": 2, "max_tokens": 3}', **asked)))
    assert told["finish_reason"] == [b"length"]
    assert told["num_output_tokens"] == [3]
    assert told["num_input_tokens"][0] > 0
    positions = json.loads(told["logprobs"][0])
    assert all(2 <= len(candidates) <= 3 for candidates in positions)
    assert len(positions) == 3
    sampled = [next(iter(candidates.values()))["logprob"] for candidates in positions]
    assert told["cumulative_logprob"][0] == pytest.approx(sum(sampled), rel=1e-5)


async def test_only_outputs_that_are_wanted_come(stub: Any) -> None:
    message = infer(return_finish_reason=True, return_num_output_tokens=True)
    message.outputs.add(name="finish_reason")
    assert outputs(await stub.ModelInfer(message)) == {"finish_reason": [b"stop"]}


async def test_a_stream_has_the_text_in_pieces(stub: Any) -> None:
    responses = await streamed(stub, [infer(stream=True, return_finish_reason=True)])
    answers = [one.infer_response for one in responses]
    assert len(answers) > 1
    assert text_of(responses) == "It is sunny."
    assert [outputs(one)["finish_reason"] for one in answers] == [*[[b"None"]] * (len(answers) - 1), [b"stop"]]
    final = [one.parameters["triton_final_response"].bool_param for one in answers]
    assert final == [False] * (len(final) - 1) + [True]


async def test_requests_of_a_stream_are_answered_beside_each_other(stub: Any) -> None:
    messages = [infer(f"{number}", stream=number % 2 == 0) for number in range(6)]
    for number, message in enumerate(messages):
        message.id = f"r{number}"
    responses = await streamed(stub, messages)
    texts = [text_of(responses, f"r{number}") for number in range(6)]
    assert texts == [("" if number % 2 == 0 else f"{number}") + "It is sunny." for number in range(6)]


async def test_an_error_of_one_request_leaves_the_others_of_its_stream(stub: Any) -> None:
    wrong = infer(stream=True, sampling_parameters='{"temperature": -1}')
    wrong.id = "wrong"
    responses = await streamed(stub, [wrong, infer(stream=True)])
    [error] = [one for one in responses if one.error_message]
    assert error.error_message == "temperature must be non-negative, got -1.0."
    assert error.infer_response.id == "wrong"
    assert text_of(responses) == "It is sunny."


async def test_several_samples_are_elements(stub: Any) -> None:
    message = infer(sampling_parameters='{"n": 3, "temperature": 1}', exclude_input_in_output=True)
    assert outputs(await stub.ModelInfer(message)) == {"text_output": [b"It is sunny."] * 3}


async def test_a_call_that_is_cancelled_gives_its_sequence_back(
    served: tuple[Running, ScriptedScheduler], stub: Any
) -> None:
    frontend, script = served
    num_before = len(script.submissions)
    script.pause()
    call = stub.ModelStreamInfer(iter([infer("stays", stream=True)]))
    await script.until(lambda: len(script.submissions) > num_before)
    call.cancel()
    await script.until(lambda: script.num_running == 0)
    await frontend.until_idle()
    assert call.cancelled()
    assert len(script.submissions) == num_before + 1
    script.resume()


def without_a_text() -> pb.ModelInferRequest:
    return infer(None)


def two_texts() -> pb.ModelInferRequest:
    message = infer()
    message.inputs[0].shape[:] = [2]
    message.inputs[0].contents.bytes_contents.append(b"more")
    return message


def cut_short() -> pb.ModelInferRequest:
    message = infer("Hm?", is_raw=True)
    message.raw_input_contents[0] = message.raw_input_contents[0][:-1]
    return message


def of_another_type() -> pb.ModelInferRequest:
    message = infer()
    message.inputs[0].datatype = "FP32"
    return message


def of_version_2() -> pb.ModelInferRequest:
    message = infer()
    message.model_version = "2"
    return message


def of_priority_4() -> pb.ModelInferRequest:
    message = infer()
    message.parameters["priority"].uint64_param = 4
    return message


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (of_priority_4(), "UNIMPLEMENTED", "priority needs the scheduling policy 'priority'"),
        (without_a_text(), "INVALID_ARGUMENT", "text_input is required"),
        (two_texts(), "INVALID_ARGUMENT", "text_input must have one element, got the shape [2] and 2 values"),
        (cut_short(), "INVALID_ARGUMENT", "text_input must have one element: its length prefix says 3 bytes, 2 follow"),
        (of_another_type(), "INVALID_ARGUMENT", "text_input is BYTES, got 'FP32'"),
        (of_version_2(), "NOT_FOUND", "the version '2' does not exist; available: 1"),
        (infer(b"\xff"), "INVALID_ARGUMENT", "text_input is not UTF-8: invalid start byte at byte 0"),
        (infer(picture="..."), "INVALID_ARGUMENT", "the input 'picture' does not exist; available: text_input, "),
        (infer(stream=True), "INVALID_ARGUMENT", "stream=true requires ModelStreamInfer"),
        (infer(sampling_parameters="{"), "INVALID_ARGUMENT", "sampling_parameters is not JSON: "),
        (infer(sampling_parameters="[]"), "INVALID_ARGUMENT", "sampling_parameters must be an object"),
        (infer(sampling_parameters='{"temprature": 1}'), "INVALID_ARGUMENT", "Unrecognized request argument"),
        (infer(sampling_parameters='{"prompt": "x"}'), "INVALID_ARGUMENT", "prompt is not a sampling parameter"),
        (infer(sampling_parameters='{"top_k": "x"}'), "INVALID_ARGUMENT", "top_k: "),
        (infer(sampling_parameters=" " * 300_000), "INVALID_ARGUMENT", "sampling_parameters has at most 262144 bytes"),
        (infer(sampling_parameters="[" * 200), "INVALID_ARGUMENT", "the body is nested"),
    ],
)
async def test_invalid_requests_are_refused_with_a_reason(
    stub: Any, message: pb.ModelInferRequest, code: str, text: str
) -> None:
    told = await refused(stub.ModelInfer(message))
    assert (told[0].name, told[1][: len(text)]) == (code, text)


async def test_a_message_of_a_stream_that_cannot_be_read_ends_it(frontend: Running) -> None:
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    raw = frontend.channel.stream_stream(path, None, pb.ModelStreamInferResponse.FromString)
    call = raw(iter([infer(stream=True).SerializeToString(), b"\xff\xff"]))
    heard: list[pb.ModelStreamInferResponse] = []
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await noted(call, heard)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text_of(heard) == "It is sunny."
