"""/v2/models/NAME/infer with tensors as bytes after the JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from quire.services.frontend.bounds.bodies.heavy_work import HEAVY_BYTES
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_replies import replying
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

INFER = "/v2/models/talking/infer"
HEADER = "inference-header-content-length"
OCTETS = {"content-type": "application/octet-stream"}
ALL_BINARY = {"binary_data_output": True}
TEXT = "text_input"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Running, ScriptedScheduler]]:
    folder = tool_model_folder(tmp_path_factory.mktemp("models") / "talking")
    script = ScriptedScheduler(replying(folder, "It is sunny."), max_model_len=4096)
    async with scheduler(script), running(folder, script.address) as frontend:
        yield frontend, script


@pytest.fixture(scope="module")
def http(served: tuple[Running, ScriptedScheduler]) -> httpx.AsyncClient:
    return served[0].http


def packed(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def behind(name: str, size: Any, **more: Any) -> dict[str, Any]:
    """A tensor whose bytes follow the JSON."""
    datatype = "BYTES" if name in (TEXT, "sampling_parameters") else "BOOL"
    parameters = {"binary_data_size": size}
    return {"name": name, "datatype": datatype, "shape": [1], "parameters": parameters, **more}


async def post(
    http: httpx.AsyncClient, body: dict[str, Any], data: bytes, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Sends the call. `headers`: None for the correct ones."""
    told = json.dumps(body).encode()
    right = {HEADER: str(len(told)), **OCTETS}
    return await http.post(INFER, content=told + data, headers=right if headers is None else headers)


def apart(reply: httpx.Response) -> tuple[dict[str, Any], bytes]:
    """Returns the JSON part of an answer and the bytes that follow."""
    assert (reply.status_code, reply.headers["content-type"]) == (200, OCTETS["content-type"]), reply.text
    size = int(reply.headers[HEADER])
    return json.loads(reply.content[:size]), reply.content[size:]


async def test_bytes_in_and_out(served: tuple[Running, ScriptedScheduler], http: httpx.AsyncClient) -> None:
    text, sampling = packed("Grüß dich. "), packed('{"max_tokens": 2, "temperature": 0.5}')
    tensors = [behind(TEXT, len(text)), behind("return_num_output_tokens", 1)]
    tensors.append(behind("sampling_parameters", len(sampling)))
    reply = await post(http, {"id": "mine", "inputs": tensors, "parameters": ALL_BINARY}, text + b"\x01" + sampling)
    told, data = apart(reply)
    answer = packed("Grüß dich. It")
    assert told == {
        "model_name": "talking",
        "model_version": "1",
        "id": "mine",
        "outputs": [
            {"name": "text_output", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(answer)}},
            {"name": "num_output_tokens", "datatype": "UINT32", "shape": [1], "parameters": {"binary_data_size": 4}},
        ],
    }
    assert data == answer + struct.pack("<I", 2)
    heard = served[1].submissions[-1]
    assert (heard.max_tokens, heard.sampling.temperature) == (2, 0.5)


async def test_some_tensors_as_bytes_and_some_as_json(http: httpx.AsyncClient) -> None:
    counts = {"name": "return_num_input_tokens", "datatype": "BOOL", "shape": [1], "data": [True]}
    sampling = packed('{"n": 2, "temperature": 1, "max_tokens": 1}')
    outputs = [{"name": "text_output", "parameters": {"binary_data": False}}, {"name": "num_input_tokens"}]
    text = {"name": TEXT, "datatype": "BYTES", "shape": [1], "data": ["x"]}
    body = {"inputs": [text, counts, behind("sampling_parameters", len(sampling))], "outputs": outputs}
    told, data = apart(await post(http, {**body, "parameters": ALL_BINARY}, sampling))
    assert [output.get("data") for output in told["outputs"]] == [["xI", "xI"], None]
    assert len(data) == 4
    assert struct.unpack("<I", data)[0] > 0
    outputs[0]["parameters"] = {"binary_data": True}
    told, data = apart(await post(http, body, sampling))
    assert data == packed("xI", "xI")
    assert told["outputs"][1]["data"][0] > 0


async def test_an_answer_is_json_unless_bytes_are_wanted(http: httpx.AsyncClient) -> None:
    text = packed("Hm? ")
    reply = await post(http, {"inputs": [behind(TEXT, len(text))]}, text)
    assert reply.headers["content-type"] == "application/json"
    assert HEADER not in reply.headers
    assert reply.json()["outputs"][0]["data"] == ["Hm? It is sunny."]
    plain = {"inputs": [{"name": TEXT, "datatype": "BYTES", "shape": [1], "data": ["Hm? "]}], "parameters": ALL_BINARY}
    assert apart(await http.post(INFER, json=plain))[1] == packed("Hm? It is sunny.")


def text_of(size: Any, **more: Any) -> dict[str, Any]:
    return {"inputs": [behind(TEXT, size, **more)]}


TWO = [behind(TEXT, 8), behind("sampling_parameters", 8)]
FOUR = packed("Hm? ")


@pytest.mark.parametrize(
    ("body", "data", "error"),
    [
        (text_of(-1), FOUR, "text_input: binary_data_size must be a number of bytes, got -1."),
        (text_of("8"), FOUR, "text_input: binary_data_size must be a number of bytes, got '8'."),
        (text_of(True), FOUR, "text_input: binary_data_size must be a number of bytes, got True."),
        (text_of(8.0), FOUR, "text_input: binary_data_size must be a number of bytes, got 8.0."),
        (text_of(9), FOUR, "text_input: binary_data_size is 9, and 8 bytes are left after the JSON."),
        (text_of(10**200), FOUR, f"text_input: binary_data_size is 1{63 * '0'}, and 8 bytes are left"),
        (text_of(7), FOUR, "text_input must have one element: its length prefix says 4 bytes, 3 follow"),
        (text_of(8), FOUR + b"!!", "2 bytes after the JSON belong to no tensor"),
        ({"inputs": TWO}, FOUR, "sampling_parameters: binary_data_size is 8, and 0 bytes are left after the JSON."),
        ({"inputs": [TWO[0]] * 2}, FOUR * 2, "text_input occurs twice"),
        (text_of(3), b"abc", "text_input begins with the length of its element in 4 bytes, got 3 bytes"),
        (
            text_of(8),
            b"\xff\xff\xff\xff....",
            "text_input must have one element: its length prefix says 4294967295 bytes, 4 follow",
        ),
        (text_of(10), packed("x", "y"), "text_input must have one element: its length prefix says 1 bytes, 6 follow"),
        (text_of(8, shape=[2]), FOUR, "text_input must have one element, got the shape [2]"),
        (text_of(8, shape=[-1]), FOUR, "text_input must have one element, got the shape [-1]"),
        (text_of(8, datatype="FP32"), FOUR, "text_input is BYTES, got 'FP32'"),
        (text_of(5), b"\x01\0\0\0\xff", "text_input is not UTF-8: invalid start byte at byte 0"),
        (text_of(8, data=["x"]), FOUR, "text_input has both data and a binary_data_size"),
        (text_of(None), b"", "text_input has neither data nor a binary_data_size"),
        (
            {"inputs": [TWO[0], behind("stream", 2)]},
            FOUR + b"\0\0",
            "stream must have one element, got the shape [1] and 2",
        ),
        ({**text_of(8), "parameters": {"binary_data_output": 1}}, FOUR, "parameters: binary_data_output must be true"),
        (
            {**text_of(8), "outputs": [{"name": "text_output", "parameters": {"binary_data": "yes"}}]},
            FOUR,
            "outputs: binary_data must be true or false, got 'yes'.",
        ),
        (
            {**text_of(8), "outputs": [{"name": "text_output", "parameters": {"classification": 3}}]},
            FOUR,
            "text_output: classification is not supported",
        ),
    ],
)
async def test_wrong_sizes_are_reported(http: httpx.AsyncClient, body: dict[str, Any], data: bytes, error: str) -> None:
    reply = await post(http, body, data)
    assert (reply.status_code, reply.json()["error"][: len(error)]) == (400, error)


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({HEADER: "0"}, f"{HEADER} is 0: JSON comes first, in a body of "),
        ({HEADER: "100000"}, f"{HEADER} is 100000: JSON comes first, in a body of "),
        ({HEADER: "-5"}, f"{HEADER} must be a number of bytes, got '-5'."),
        ({HEADER: "9" * 5000}, f"{HEADER} must be a number of bytes, got '999"),
        ({HEADER: "1e2"}, f"{HEADER} must be a number of bytes, got '1e2'."),
        ({HEADER: "10, 20"}, f"{HEADER} must be a number of bytes, got '10, 20'."),
        ({HEADER: "20"}, "the body is not JSON: "),
        ({}, "the body is not JSON: Extra data"),
        ({**OCTETS}, "content-type is 'application/octet-stream': send application/json"),
    ],
)
async def test_a_wrong_header_is_reported(http: httpx.AsyncClient, headers: dict[str, str], error: str) -> None:
    reply = await post(http, text_of(8), FOUR, headers)
    assert (reply.status_code, reply.json()["error"][: len(error)]) == (400, error)


async def test_a_tensor_needs_the_header_for_its_bytes(http: httpx.AsyncClient) -> None:
    reply = await http.post(INFER, json=text_of(8))
    assert reply.status_code == 400
    assert reply.json()["error"] == f"text_input has a binary_data_size, and the header {HEADER} is missing."


async def test_large_bodies_of_both_kinds(http: httpx.AsyncClient) -> None:
    """The child process checks the JSON part and leaves the bytes after it in place."""
    custom = {"binary_data_size": 8, "custom": "x" * HEAVY_BYTES}
    reply = await post(http, {"inputs": [behind(TEXT, 8, parameters=custom)]}, FOUR)
    assert reply.json()["outputs"][0]["data"] == ["Hm? It is sunny."]
    listed = await post(http, {**text_of(8), "tokens": [7] * HEAVY_BYTES}, FOUR)
    assert (listed.status_code, listed.json()["error"][:13]) == (400, "tokens: Extra")
    wrong = await post(http, {"inputs": [], "x": "x" * HEAVY_BYTES, "y": [0] * 300_000}, FOUR)
    assert (wrong.status_code, wrong.json()["error"][:27]) == (400, "the body contains more than")
    text = packed("ä" * (1 << 20))
    long = await post(http, text_of(len(text)), text)
    assert (long.status_code, f"your prompt has {2 << 20} bytes" in long.json()["error"]) == (400, True)
