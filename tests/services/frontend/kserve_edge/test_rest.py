"""/v2 as clients of KServe and Triton call it over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from quire.shared.version import VERSION
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_replies import replying
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "/v2/models/talking"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Running, ScriptedScheduler]]:
    folder = tool_model_folder(tmp_path_factory.mktemp("models") / "talking")
    script = ScriptedScheduler(replying(folder, "It is sunny."), max_model_len=4096)
    async with scheduler(script), running(folder, script.address) as frontend:
        frontend.write_each_token(script)
        yield frontend, script


@pytest.fixture(scope="module")
def http(served: tuple[Running, ScriptedScheduler]) -> httpx.AsyncClient:
    return served[0].http


def tensor(name: str, value: Any, **more: Any) -> dict[str, Any]:
    datatype = "BOOL" if isinstance(value, bool) else "BYTES"
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value], **more}


def infer(*more: dict[str, Any], text: str = "Hm? ", **fields: Any) -> dict[str, Any]:
    return {"inputs": [tensor("text_input", text), *more], **fields}


async def test_server_and_model_metadata(http: httpx.AsyncClient) -> None:
    server, model, versioned = [(await http.get(path)).json() for path in ("/v2", MODEL, f"{MODEL}/versions/1")]
    assert (server["name"], server["version"]) == ("quire", VERSION)
    assert (model["name"], model["versions"]) == ("talking", ["1"])
    assert {"name": "text_input", "datatype": "BYTES", "shape": [1]} in model["inputs"]
    assert {"name": "text_output", "datatype": "BYTES", "shape": [-1]} in model["outputs"]
    assert versioned == model


async def test_probes(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v2/health/live")).json() == {"live": True}
    assert (await http.get("/v2/health/ready")).json() == {"ready": True}
    assert (await http.get(f"{MODEL}/ready")).json() == {"name": "talking", "ready": True}
    assert (await http.get("/v2/models/other/ready")).status_code == 404


async def test_an_unknown_version_is_reported_by_each_path(http: httpx.AsyncClient) -> None:
    """A client would retry a 503."""
    for path in (f"{MODEL}/versions/2", f"{MODEL}/versions/2/ready", f"{MODEL}?version=2", f"{MODEL}/ready?version=2"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()) == (404, {"error": "the version '2' does not exist; available: 1"})


async def test_tensors_in_and_out(http: httpx.AsyncClient) -> None:
    counts, alone = tensor("return_num_output_tokens", True), tensor("exclude_input_in_output", True)
    reply = await http.post(f"{MODEL}/infer", json=infer(counts, alone, id="mine"))
    told = reply.json()
    [text, count] = told.pop("outputs")
    assert told == {"model_name": "talking", "model_version": "1", "id": "mine"}
    assert text == {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["It is sunny."]}
    assert (count["datatype"], count["data"][0] > 2) == ("UINT32", True)
    assert reply.headers["x-request-id"] == "mine"


async def test_elements_in_rows_and_parameters(
    served: tuple[Running, ScriptedScheduler], http: httpx.AsyncClient
) -> None:
    rows = {**tensor("text_input", "Hm? "), "shape": [1, 1], "data": [["Hm? "]]}
    body = {"inputs": [rows], "parameters": {"max_tokens": 2, "temperature": 0.5}, "outputs": [{"name": "text_output"}]}
    reply = await http.post(f"{MODEL}/versions/1/infer", json=body)
    heard = served[1].submissions[-1]
    assert reply.json()["outputs"][0]["data"] == ["Hm? It"]
    assert (heard.max_tokens, heard.sampling.temperature) == (2, 0.5)


async def test_fields_in_and_out(served: tuple[Running, ScriptedScheduler], http: httpx.AsyncClient) -> None:
    body = {"text_input": "Hm? ", "parameters": {"max_tokens": 3}, "top_k": 4, "return_finish_reason": True}
    told = (await http.post(f"{MODEL}/generate", json=body)).json()
    several = await http.post(f"{MODEL}/generate", json={"text_input": "x", "n": 2, "temperature": 1})
    assert told["text_output"].startswith("Hm? It")
    assert told["finish_reason"] == "length"
    assert several.json()["text_output"] == ["xIt is sunny."] * 2


async def test_a_stream_of_events(http: httpx.AsyncClient) -> None:
    reply = await http.post(f"{MODEL}/generate_stream", json={"text_input": "Hm?", "return_finish_reason": True})
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line]
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "".join(event["text_output"] for event in events) == "It is sunny."
    assert [event["finish_reason"] for event in events][-2:] == ["None", "stop"]


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("infer", {}, 400, "inputs: Field required"),
        ("infer", infer(tensor("picture", "x")), 400, "the input 'picture' does not exist"),
        ("infer", infer(tensor("stream", True)), 400, "stream=true requires /generate_stream, or gRPC"),
        ("infer", infer(tensor("sampling_parameters", 5)), 400, "sampling_parameters is BYTES, got int"),
        (
            "infer",
            infer(text="x") | {"inputs": [tensor("text_input", "x", shape=[2])]},
            400,
            "text_input must have one",
        ),
        ("infer", infer(parameters={"top_p": 7}), 400, "top_p must be in (0, 1], got 7.0."),
        ("generate", {"text_input": "x", "stream": True}, 400, "stream=True needs the other path"),
        ("generate", {"text_input": "x", "temprature": 1}, 400, "Unrecognized request argument supplied: temprature"),
        ("versions/2/infer", infer(), 404, "the version '2' does not exist; available: 1"),
    ],
)
async def test_invalid_bodies_are_refused_with_a_reason(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, error: str
) -> None:
    reply = await http.post(f"{MODEL}/{path}", json=body)
    assert (reply.status_code, reply.json()["error"][: len(error)]) == (status, error)


async def test_a_full_server_refuses_from_the_headers(served: tuple[Running, ScriptedScheduler]) -> None:
    frontend, _ = served
    lease = frontend.frontend.ingress.admission.lease()
    lease.acquire(1024, 0)
    reply = await frontend.http.post(f"{MODEL}/infer", content=b"not even JSON")
    lease.release()
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert "error" in reply.json()
    labels = "{handler=/v2/models/{name:path}/infer,method=POST,status=4xx}"
    assert any(name.endswith(labels) for name in await frontend.metrics())
