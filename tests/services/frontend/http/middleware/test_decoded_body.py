"""Bodies with a Content-Encoding, on every edge.

Sources: ollama#12386, teleport PR 68859, codex-proxy-rs PR 66 (zstd of Codex), agentgateway#2402 (gzip of Claude Code),
new-api#4913, tritonclient's compression.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import shutil
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from backports import zstd
from starlette.types import Message, Receive

from quire.services.frontend.http.middleware.decoded_body import BodyDecoders, DecodedBytes
from quire.shared.errors import ResourceExhausted
from tests.priorities import behind, thread_priorities
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "a-key-of-the-tests"
SHOWN = {"authorization": f"Bearer {KEY}"}
SAID = [{"role": "user", "content": "hi"}]
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "talking", "prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"model": "talking", "messages": SAID, "max_tokens": 3},
    "/v1/responses": {"model": "talking", "input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "talking", "messages": SAID, "max_tokens": 3},
    "/api/chat": {"model": "talking", "messages": SAID, "stream": False, "options": {"num_predict": 3}},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 3}},
    "/v2/models/talking/infer": {"inputs": [TENSOR]},
    "/tokenize": {"model": "talking", "prompt": "hi"},
}
PACKS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folders = tmp_path_factory.mktemp("decoded")
    script = ScriptedScheduler(count_up)
    settings: dict[str, Any] = {
        "max_request_bytes": 1 << 20,
        "batch_folder": str(folders / "batches"),
        "batch_file_mb": 3,
        "api_key": KEY,
    }
    folder = tool_model_folder(folders / "talking")
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        frontend.http.headers.update(SHOWN)
        yield frontend


def packed(body: bytes, *encodings: str) -> bytes:
    for name in encodings:
        body = PACKS[name](body)
    return body


@pytest.mark.parametrize("encoding", PACKS)
@pytest.mark.parametrize("path", BODIES)
async def test_a_body_is_decoded_whatever_reads_it(frontend: Running, path: str, encoding: str) -> None:
    body = packed(json.dumps(BODIES[path]).encode(), encoding)
    answer = await frontend.http.post(path, content=body, headers={"content-encoding": encoding})
    assert answer.status_code == 200, answer.text


async def test_several_encodings_in_a_row(frontend: Running) -> None:
    body = json.dumps(BODIES["/v1/completions"]).encode()
    both = packed(body, "deflate", "gzip")
    for headers in (
        [("content-encoding", "deflate, gzip")],
        [("content-encoding", "deflate"), ("content-encoding", "gzip")],
        [("content-encoding", "identity, deflate, X-GZIP")],
    ):
        answer = await frontend.http.post("/v1/completions", content=both, headers=headers)
        assert answer.status_code == 200, answer.text
    swapped = await frontend.http.post("/v1/completions", content=both, headers={"content-encoding": "gzip, deflate"})
    assert swapped.status_code == 400
    assert swapped.json()["error"]["param"] == "content-encoding"


async def test_in_chunks(frontend: Running) -> None:
    body = packed(json.dumps(BODIES["/v1/completions"]).encode(), "zstd")

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 7):
            yield body[at : at + 7]

    answer = await frontend.http.post("/v1/completions", content=pieces(), headers={"content-encoding": "zstd"})
    assert answer.status_code == 200


async def test_a_large_body_is_read_and_counted(frontend: Running) -> None:
    """It is decoded in the thread, and checked by the child process."""
    text = random.Random(2).randbytes(200_000).hex()
    for encoding in PACKS:
        body = packed(json.dumps({"model": "talking", "prompt": text}).encode(), encoding)
        answer = await frontend.http.post("/v1/completions", content=body, headers={"content-encoding": encoding})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_encoding_is_415_with_those_that_are_accepted(frontend: Running, path: str) -> None:
    for named in ("br", "gzip, compress", "x" * 5000):
        answer = await frontend.http.post(path, content=b"\x1b\x03", headers={"content-encoding": named})
        assert answer.status_code == 415, answer.text
        assert "bodies may be encoded as gzip, deflate, zstd, identity" in answer.text
        assert len(answer.content) < 1000


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_not_what_it_says_is_400(frontend: Running, path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    for sent, said in (
        (body, "the body is not gzip"),
        (gzip.compress(body)[:-3], "gzip stream is truncated"),
        (b"", "is truncated"),
    ):
        answer = await frontend.http.post(path, content=sent, headers={"content-encoding": "gzip"})
        assert answer.status_code == 400
        assert said in answer.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("encodings", [("gzip",), ("zstd",), ("deflate", "zstd"), ("gzip", "gzip", "gzip")])
async def test_bombs_are_413(frontend: Running, path: str, encodings: tuple[str, ...]) -> None:
    bomb = packed(b" " * (16 << 20), *encodings)
    answer = await frontend.http.post(path, content=bomb, headers={"content-encoding": ", ".join(encodings)})
    assert answer.status_code == 413, answer.text
    assert "once it is decoded" in answer.text or "times its size" in answer.text


async def test_nothing_is_decoded_for_those_without_a_key(frontend: Running) -> None:
    bomb = packed(b" " * (16 << 20), "gzip")
    headers = {"content-encoding": "gzip", "authorization": "Bearer wrong"}
    for named in ("gzip", "br"):
        answer = await frontend.http.post(
            "/v1/completions", content=bomb, headers={**headers, "content-encoding": named}
        )
        assert answer.status_code == 401


async def test_files_are_decoded_within_their_own_limit(frontend: Running) -> None:
    """The limit on disk applies to decoded bytes, not to received ones."""
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x" * 900}})
    for count, status in ((2000, 200), (4000, 413)):
        content = "\n".join(line.replace("a", str(number), 1) for number in range(count)).encode()
        head = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        head += b'--b\r\ncontent-disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
        form = packed(head + content + b"\r\n--b--\r\n", "zstd")
        headers = {"content-encoding": "zstd", "content-type": "multipart/form-data; boundary=b"}
        answer = await frontend.http.post("/v1/files", content=form, headers=headers)
        assert answer.status_code == status, answer.text
        assert status != 200 or answer.json()["bytes"] == len(content)


async def test_lengths_of_json_in_front_of_tensors_count_decoded_bytes(frontend: Running) -> None:
    """As tritonclient sends it with request_compression_algorithm."""
    tensor = {**TENSOR, "parameters": {"binary_data_size": 6}}
    del tensor["data"]
    front = json.dumps({"inputs": [tensor]}).encode()
    for encoding in ("gzip", "deflate"):
        headers = {
            "content-encoding": encoding,
            "inference-header-content-length": str(len(front)),
            "content-type": "application/octet-stream",
        }
        body = packed(front + b"\2\0\0\0hi", encoding)
        answer = await frontend.http.post("/v2/models/talking/infer", content=body, headers=headers)
        assert answer.status_code == 200, answer.text


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_as_curl_sends_it(frontend: Running, tmp_path: Path) -> None:
    """With `Expect: 100-continue`, which curl sends for bodies over 1 MiB, and in chunks."""
    sent = tmp_path / "body"
    body = json.dumps({"prompt": "hi", "max_tokens": 2, "user": random.Random(3).randbytes(200_000).hex()}).encode()
    for encoding in PACKS:
        sent.write_bytes(packed(body, encoding))
        for how in ("Expect: 100-continue", "Transfer-Encoding: chunked"):
            command = ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-H", how, "--data-binary", f"@{sent}"]
            command += [
                "-H",
                f"content-encoding: {encoding}",
                "-H",
                f"x-api-key: {KEY}",
                "-H",
                "content-type: application/json",
                f"{frontend.url}/v1/completions",
            ]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            out, _ = await process.communicate()
            assert out == b"200"


async def test_decoded_bytes_of_all_calls_are_limited() -> None:
    """Each body is small as sent; a single one always fits, and read bodies are released."""
    decoders = BodyDecoders(max_held=1 << 20)
    body = gzip.compress(random.Random(5).randbytes(400_000).hex().encode())

    def receive() -> Receive:
        return once(body)

    async def read(held: DecodedBytes) -> int:
        receiving, num_bytes = decoders.decoded(receive(), ("gzip",), 1 << 24, held), 0
        while (message := await receiving())["more_body"]:
            num_bytes += len(message["body"])
        return num_bytes

    with decoders.held() as first:
        assert await read(first) == 800_000
        with decoders.held() as second, pytest.raises(ResourceExhausted, match="or send the body without"):
            await read(second)
        first.release()
        with decoders.held() as third:
            assert await read(third) == 800_000
            with decoders.held() as fourth, pytest.raises(ResourceExhausted):
                await decoders.decode(body, ("gzip",), 1 << 24, fourth)
    with BodyDecoders(max_held=1000).held() as alone:
        assert len(await decoders.decode(body, ("gzip",), 1 << 24, alone)) == 800_000
    assert decoders.num_held == 0
    decoders.close()


async def test_decoding_leaves_the_processors_to_streams() -> None:
    decoders = BodyDecoders()
    with decoders.held() as held:
        assert await decoders.decode(gzip.compress(b"a"), ("gzip",), 1 << 20, held) == b"a"
    priorities = thread_priorities("decode-bodies")
    own = priorities.pop("MainThread")
    decoders.close()
    assert set(priorities.values()) == {behind(own)}


def once(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def test_what_was_read_is_given_back_before_the_answer(frontend: Running) -> None:
    decoders = frontend.frontend.ingress.decoders
    body = packed(json.dumps({**BODIES["/v1/completions"], "max_tokens": 200, "stream": True}).encode(), "gzip")
    async with frontend.http.stream(
        "POST", "/v1/completions", content=body, headers={"content-encoding": "gzip"}
    ) as answer:
        assert answer.status_code == 200
        assert decoders.num_held == 0
        await answer.aread()


async def test_the_document_names_the_status(frontend: Running) -> None:
    document = (await frontend.http.get("/openapi.json")).json()
    assert "415" in document["paths"]["/v1/responses"]["post"]["responses"]
