"""Tests of InferenceService over Connect and gRPC-Web, byte by byte."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from backports import zstd
from google.rpc import error_details_pb2, status_pb2

from quire.services.frontend.web_edge.framing import frame
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_replies import replying
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICE = "/quire.inference.v1.InferenceService"
REPLY = "It is sunny."
ASK = pb.GenerateRequest(text="Hm?")
Frame = tuple[int, bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(folder: Path) -> AsyncIterator[tuple[Running, ScriptedScheduler]]:
    script = ScriptedScheduler(replying(folder, REPLY), max_model_len=4096)
    settings: dict[str, Any] = {"cors_origins": ("https://page.example",), "max_request_bytes": 1 << 20}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        frontend.write_each_token(script)
        yield frontend, script


@pytest.fixture(scope="module")
def frontend(served: tuple[Running, ScriptedScheduler]) -> Running:
    return served[0]


async def called(frontend: Running, method: str, kind: str, body: bytes, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await frontend.http.post(f"{SERVICE}/{method}", content=body, headers={"content-type": kind} | named)


def frames(body: bytes) -> list[Frame]:
    found = []
    while body:
        end = 5 + int.from_bytes(body[1:5], "big")
        found.append((body[0], body[5:end]))
        body = body[end:]
    return found


def text_of(answer: list[Frame]) -> str:
    return "".join(pb.GenerateResponse.FromString(data).text for _, data in answer)


def trailers(last: Frame) -> dict[str, str]:
    assert last[0] == 0x80
    return dict(line.split(": ", 1) for line in last[1].decode().splitlines())


async def test_unary_connect_calls_are_plain_http(frontend: Running) -> None:
    in_bytes = await called(frontend, "ListModels", "application/proto", b"")
    in_json = await called(frontend, "ListModels", "application/json", b"{}", connect_protocol_version="1")
    [model] = pb.ListModelsResponse.FromString(in_bytes.content).models
    assert (in_bytes.status_code, in_bytes.headers["content-type"]) == (200, "application/proto")
    assert model.name == "talking"
    assert in_json.json()["models"][0]["maxModelLen"] == 4096
    assert in_json.headers["trailer-quire-frontend"]


async def test_a_page_resumes_a_stream(frontend: Running) -> None:
    asked = pb.GenerateRequest(text="Hm?", resumable=True, options=pb.RequestOptions(request_id="page"))
    kind = "application/connect+proto"
    begun = frames((await called(frontend, "Generate", kind, frame(0, asked.SerializeToString()))).content)
    attached = frame(0, pb.AttachRequest(request_id="page", offset=1).SerializeToString())
    answer = frames((await called(frontend, "Attach", kind, attached)).content)
    again = [pb.AttachResponse.FromString(data).generate for _, data in answer[:-1]]
    assert again == [pb.GenerateResponse.FromString(data) for _, data in begun[1:-1]]
    assert len(again) > 1


async def test_connect_streams_end_with_an_end_message(frontend: Running) -> None:
    reply = await called(frontend, "Generate", "application/connect+proto", frame(0, ASK.SerializeToString()))
    *answer, last = frames(reply.content)
    assert text_of(answer) == REPLY
    assert len(answer) > 1
    assert {flags for flags, _ in answer} == {0}
    assert last == (2, b"{}")


async def test_connect_streams_in_json(frontend: Running) -> None:
    body = frame(0, b'{"text": "Hm?", "sampling": {"maxTokens": 2, "temperature": 0}}')
    reply = await called(frontend, "Generate", "application/connect+json", body)
    *answer, _ = [json.loads(data) for _, data in frames(reply.content)]
    assert "".join(one["text"] for one in answer) == "It"
    assert answer[-1]["finishReason"] == "FINISH_REASON_LENGTH"


@pytest.mark.parametrize("kind", ["application/grpc-web", "application/grpc-web+proto"])
async def test_grpc_web_ends_with_trailers(frontend: Running, kind: str) -> None:
    reply = await called(frontend, "Generate", kind, frame(0, ASK.SerializeToString()))
    unary = await called(frontend, "GetModel", kind, frame(0, b""))
    *answer, last = frames(reply.content)
    assert text_of(answer) == REPLY
    assert trailers(last)["grpc-status"] == "0"
    [(_, model), end] = frames(unary.content)
    assert pb.GetModelResponse.FromString(model).model.name == "talking"
    assert trailers(end)["grpc-status"] == "0"


async def test_grpc_web_as_text(frontend: Running) -> None:
    body = base64.b64encode(frame(0, ASK.SerializeToString()))
    reply = await called(frontend, "Generate", "application/grpc-web-text", body)
    pieces = reply.content.replace(b"=", b"= ").split()  # each frame is padded
    assert reply.headers["content-type"] == "application/grpc-web-text"
    decoded = b"".join(map(base64.b64decode, _padded(pieces)))
    assert text_of(frames(decoded)[:-1]) == REPLY


def _padded(pieces: list[bytes]) -> list[bytes]:
    """Joins `=` to the piece before it, since `==` was split."""
    found: list[bytes] = []
    for piece in pieces:
        if piece == b"=":
            found[-1] += piece
        else:
            found.append(piece)
    return found


async def test_connect_errors_have_a_status_a_code_and_details(frontend: Running) -> None:
    unary = await called(frontend, "GetModel", "application/json", b'{"model": "other"}')
    stream = await called(frontend, "Generate", "application/connect+json", frame(0, b'{"text": ""}'))
    answer = unary.json()
    assert (unary.status_code, answer["code"]) == (404, "not_found")
    assert answer["message"] == "The model `other` does not exist; available: talking."
    violation = error_details_pb2.BadRequest.FromString(base64.b64decode(answer["details"][0]["value"] + "=="))
    assert violation.field_violations[0].field == "model"
    [(flags, last)] = frames(stream.content)
    assert (stream.status_code, flags) == (200, 2)
    assert json.loads(last)["error"]["code"] == "invalid_argument"


async def test_errors_of_grpc_web_are_trailers_that_hold_any_text(frontend: Running) -> None:
    message = pb.GetModelRequest(model="ändere\nmich%")
    reply = await called(frontend, "GetModel", "application/grpc-web", frame(0, message.SerializeToString()))
    [last] = frames(reply.content)
    answer = trailers(last)
    assert (reply.status_code, answer["grpc-status"]) == (200, "5")
    assert answer["grpc-message"] == "The model `%C3%A4ndere%0Amich%25` does not exist; available: talking."
    details = base64.b64decode(answer["grpc-status-details-bin"] + "===")
    assert (
        status_pb2.Status.FromString(details).message == "The model `ändere\nmich%` does not exist; available: talking."
    )


async def test_a_deadline_ends_a_stalled_call(served: tuple[Running, ScriptedScheduler]) -> None:
    frontend, script = served
    script.pause()
    body = frame(0, ASK.SerializeToString())
    connect = await called(frontend, "Generate", "application/connect+proto", body, connect_timeout_ms="300")
    web = await called(frontend, "Generate", "application/grpc-web", body, grpc_timeout="300m")
    script.resume()
    assert json.loads(frames(connect.content)[-1][1])["error"]["code"] == "deadline_exceeded"
    assert trailers(frames(web.content)[-1])["grpc-status"] == "4"
    await frontend.until_idle()


async def test_a_disconnected_client_releases_its_sequence(served: tuple[Running, ScriptedScheduler]) -> None:
    frontend, script = served
    num_before = len(script.submissions)
    script.pause()
    body = frame(0, ASK.SerializeToString())
    call = asyncio.ensure_future(called(frontend, "Generate", "application/connect+proto", body))
    await script.until(lambda: len(script.submissions) > num_before)
    call.cancel()
    await script.until(lambda: script.num_running == 0)
    await frontend.until_idle()
    script.resume()


async def test_calls_are_counted_as_in_grpc(frontend: Running) -> None:
    counted = "quire_frontend_grpc_requests_total{code=NOT_FOUND,method=GetModel}"
    before = (await frontend.metrics()).get(counted, 0)
    await called(frontend, "GetModel", "application/json", b'{"model": "other"}')
    assert (await frontend.metrics())[counted] == before + 1


async def test_pages_of_configured_origins_may_call(frontend: Running) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "connect-protocol-version"}
    ours = await frontend.http.options(f"{SERVICE}/Generate", headers=asks | {"origin": "https://page.example"})
    other = await frontend.http.options(f"{SERVICE}/Generate", headers=asks | {"origin": "https://other.example"})
    assert (ours.status_code, ours.headers["access-control-allow-origin"]) == (204, "https://page.example")
    assert (other.status_code, "access-control-allow-origin" in other.headers) == (204, False)
    assert ours.headers["allow"] == other.headers["allow"] == "OPTIONS, POST"
    answer = await called(frontend, "GetModel", "application/json", b"{}", origin="https://page.example")
    assert "grpc-status" in answer.headers["access-control-expose-headers"]


async def test_other_requests_get_http_errors(frontend: Running) -> None:
    proto = {"content-type": "application/proto"}
    assert (await frontend.http.post(f"{SERVICE}/Nothing", headers=proto)).status_code == 404
    assert (await frontend.http.get(f"{SERVICE}/ListModels")).status_code == 404
    assert (await called(frontend, "ListModels", "text/plain", b"")).status_code == 415
    assert (await called(frontend, "Generate", "application/proto", b"")).status_code == 415
    assert (await called(frontend, "ListModels", "application/connect+proto", frame(0, b""))).status_code == 415


CONNECT, WEB, JSON = "application/connect+proto", "application/grpc-web", "application/json"
LONG_LIST = json.dumps({"tokenIds": [1] * 9000}).encode()


@pytest.mark.parametrize(
    ("method", "kind", "body", "text"),
    [
        ("Generate", CONNECT, b"", "the body is not one message with its length"),
        ("Generate", CONNECT, frame(0, b"") * 2, "the body is not one message with its length"),
        ("Generate", CONNECT, frame(0, b"")[:-1] + b"\7", "the body is not one message with its length"),
        ("Generate", CONNECT, frame(1, b""), "the message is marked as compressed, but connect-content-encoding names"),
        ("Generate", CONNECT, frame(0, b"\xff\xff"), "the message is not a quire.inference.v1.GenerateRequest"),
        ("Detokenize", JSON, b"{", "the message is not a quire.inference.v1.DetokenizeRequest"),
        ("Detokenize", JSON, b'{"x": 1}', "the message is not a quire.inference.v1.DetokenizeRequest"),
        ("Detokenize", JSON, b"[" * 2000, "the body is nested"),
        ("Detokenize", JSON, LONG_LIST, "the body contains more than 8192 values"),
        ("Detokenize", JSON, b" " * (1 << 20) + b"{}", "the body has more than 1048576 bytes"),
        ("GetModel", "application/grpc-web-text", b"!", "the body is not base64"),
    ],
)
async def test_malformed_bodies_are_errors(frontend: Running, method: str, kind: str, body: bytes, text: str) -> None:
    reply = await called(frontend, method, kind, body)
    if kind == JSON:
        message_text = reply.json()["message"]
    elif kind == CONNECT:
        message_text = json.loads(frames(reply.content)[-1][1])["error"]["message"]
    else:
        message_text = trailers(frames(base64.b64decode(reply.content))[-1])["grpc-message"]
    assert message_text.startswith(text)
    await frontend.until_idle()


async def test_messages_and_bodies_may_be_compressed(frontend: Running) -> None:
    """Checks the content encoding of a unary Connect call, and the flag of a framed message."""
    asked = pb.GetModelRequest(model="talking").SerializeToString()
    for pack, name in ((gzip.compress, "gzip"), (zlib.compress, "deflate"), (zstd.compress, "zstd")):
        unary = await called(frontend, "GetModel", "application/proto", pack(asked), content_encoding=name)
        flagged = await called(frontend, "GetModel", WEB, frame(1, pack(asked)), grpc_encoding=name)
        plain = await called(frontend, "GetModel", WEB, frame(0, asked), grpc_encoding=name)
        stream = frame(1, pack(ASK.SerializeToString()))
        streamed = await called(frontend, "Generate", CONNECT, stream, connect_content_encoding=name)
        assert pb.GetModelResponse.FromString(unary.content).model.name == "talking"
        for reply in (flagged, plain):
            assert pb.GetModelResponse.FromString(frames(reply.content)[0][1]).model.name == "talking"
        assert text_of(frames(streamed.content)[:-1]) == REPLY
    torn = await called(frontend, "GetModel", WEB, frame(1, b"no gzip"), grpc_encoding="gzip")
    large = await called(frontend, "GetModel", WEB, frame(1, gzip.compress(b" " * (3 << 20))), grpc_encoding="gzip")
    unknown = await called(frontend, "GetModel", WEB, frame(1, b""), grpc_encoding="snappy")
    message_text = [trailers(frames(reply.content)[-1]) for reply in (torn, large, unknown)]
    assert [one["grpc-status"] for one in message_text] == ["3", "3", "12"]
    assert message_text[0]["grpc-message"].startswith("the body is not gzip")
    assert message_text[1]["grpc-message"].startswith("the body has more than 1048576 bytes once it is decoded")
    assert message_text[2]["grpc-message"].endswith("may be encoded as gzip, deflate, zstd, identity")


@pytest.mark.parametrize(
    "headers",
    [
        {"content_encoding": "gzip"},  # the body is not compressed
        {"content_encoding": "br"},
        {"grpc_timeout": "5"},
        {"connect_timeout_ms": "-1"},
    ],
)
async def test_wrong_headers_are_errors(frontend: Running, headers: dict[str, str]) -> None:
    reply = await called(frontend, "GetModel", JSON, b"{}", **headers)
    [name] = headers
    assert reply.status_code in (400, 501)
    assert name.replace("_", "-") in reply.json()["message"]


async def test_the_key_is_checked_before_the_body_is_read(folder: Path) -> None:
    script = ScriptedScheduler(replying(folder, REPLY), max_model_len=4096)
    async with scheduler(script), running(folder, script.address, api_key="the-key-of-all") as frontend:
        without = await called(frontend, "GetModel", JSON, b"{" * 100)
        with_key = await called(frontend, "GetModel", JSON, b"{}", authorization="Bearer the-key-of-all")
        web = await called(frontend, "GetModel", WEB, b"")
        twice = [("authorization", f"Bearer {key}") for key in ("wrong", "the-key-of-all")]
        both = await frontend.http.post(f"{SERVICE}/GetModel", content=b"{}", headers=[("content-type", JSON), *twice])
        other = await called(frontend, "GetModel", "text/plain", b"")
        nobodys = await called(frontend, "Nothing", WEB, b"")
    assert (without.status_code, without.json()["code"]) == (401, "unauthenticated")
    assert with_key.status_code == 200
    assert trailers(frames(web.content)[-1])["grpc-status"] == "16"
    assert both.status_code == 401
    assert (other.status_code, nobodys.status_code) == (401, 401)


async def test_a_full_server_sends_retry_after(folder: Path) -> None:
    script = ScriptedScheduler(replying(folder, REPLY), max_model_len=4096)
    settings = {"max_inflight_requests": 1, "retry_after_ms": 700}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        script.pause()
        body = frame(0, ASK.SerializeToString())
        first = asyncio.ensure_future(called(frontend, "Generate", CONNECT, body))
        await script.until(lambda: script.num_running == 1)
        refused = await called(frontend, "Embed", JSON, b"{}")
        script.resume()
        assert text_of(frames((await first).content)[:-1]) == REPLY
    [detail] = refused.json()["details"]
    retry = error_details_pb2.RetryInfo.FromString(base64.b64decode(detail["value"] + "=="))
    assert (refused.status_code, detail["type"]) == (429, "google.rpc.RetryInfo")
    assert retry.retry_delay.ToMilliseconds() == 700
