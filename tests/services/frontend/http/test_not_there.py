"""Errors about unknown models and paths use the API's format and name what exists."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from quire.services.frontend.http.server.protocol import CUT_SHORT, LARGE_HEADERS, NO_TUNNELS, TOO_MANY, TOO_SLOW
from quire.services.frontend.request.model_names import model_not_found
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAID = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": SAID},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/api/chat": {"messages": SAID},
    "/api/generate": {"prompt": "x"},
    "/v2/models/other/infer": {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]},
    "/v2/models/other/generate": {"text_input": "x"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(folder: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        yield frontend


@pytest.mark.parametrize("path", ASKED)
async def test_a_model_that_is_not_there_is_404_with_those_that_are(frontend: Running, path: str) -> None:
    answer = await frontend.http.post(path, json={**({} if "/other/" in path else {"model": "other"}), **ASKED[path]})
    assert answer.status_code == 404
    assert "The model `other` does not exist; available: tiny." in answer.text


async def test_looks_at_one_model_say_it_too(frontend: Running) -> None:
    for path in ("/v1/models/other", "/v2/models/other", "/v2/models/other/ready"):
        answer = await frontend.http.get(path)
        assert answer.status_code == 404
        assert "does not exist; available: tiny." in answer.text
    shown = await frontend.http.post("/api/show", json={"model": "other"})
    assert (shown.status_code, "available: tiny." in shown.json()["error"]) == (404, True)


async def test_as_clients_read_it(frontend: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="available: tiny"):
            await client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "hi"}])
    async with anthropic.AsyncAnthropic(base_url=frontend.url, api_key="x", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="available: tiny"):
            await client.messages.create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "hi"}])


async def test_a_long_list_is_cut() -> None:
    told = model_not_found("x", ["base"], [f"a{number:02}" for number in range(40)]).message
    assert told.startswith("The model `x` does not exist; available: base, a00, a01,")
    assert told.endswith(", a14 and 25 more.")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v2/nowhere", None, 404),
        ("GET", "/v2/models/tiny/versions/7", None, 404),
        ("GET", "/v2/models/tiny/config", None, 404),  # tritonclient: get_model_config
        ("GET", "/v2/models/tiny/versions/1/stats", None, 404),
        ("POST", "/v2/repository/index", b"{}", 404),
        ("GET", "/v2/systemsharedmemory/status", None, 404),
        ("POST", "/v2", b"{}", 405),
        ("PUT", "/v2/models/tiny/infer", b"{}", 405),
        ("POST", "/v2/models/tiny/infer", b"{", 400),
        ("POST", "/v2/models/tiny/infer", b"", 400),
        ("POST", "/v2/models/tiny/infer", b'{"inputs": 5}', 400),
        ("POST", "/v2/models/tiny/versions/7/infer", b"{}", 400),
        ("POST", "/v2/models/tiny/infer", b" " * (17 << 20), 413),
        ("TRACE", "/v2/models/tiny", None, 405),
    ],
)
async def test_errors_of_the_open_inference_protocol_are_a_text(
    frontend: Running, method: str, path: str, body: bytes | None, status: int
) -> None:
    """tritonclient concatenates the error with text and raised a TypeError for OpenAI's object."""
    answer = await frontend.http.request(method, path, content=body)
    told = answer.json()
    assert (answer.status_code, list(told)) == (status, ["error"])
    assert isinstance(told["error"], str)
    assert "`tiny/config`" not in told["error"]


async def test_errors_of_probes_of_the_protocol_are_a_text(folder: Path) -> None:
    async with running(folder, until_health=(503,)) as frontend:
        answer = await frontend.http.get("/v2/health/ready")
        listed = await frontend.http.get("/v2/models/tiny/ready")
    for one in (answer, listed):
        assert (one.status_code, isinstance(one.json()["error"], str)) == (503, True)


async def test_other_apis_paths_under_v2_keep_their_error_format(frontend: Running) -> None:
    for path in ("/v2/rerank", "/v2/embed"):
        answer = await frontend.http.post(path, content=b"{")
        assert (answer.status_code, "message" in answer.json()["error"]) == (400, True)
    document = (await frontend.http.get("/openapi.json")).json()["paths"]

    def shape(path: str, method: str) -> Any:
        found = document[path][method]["responses"]["404"]["content"]["application/json"]["schema"]
        return found["properties"]["error"]["type"]

    assert [shape("/v2/rerank", "post"), shape("/v2/embed", "post"), shape("/v2", "get")] == [
        "object",
        "object",
        "string",
    ]


async def test_compaction_is_not_there(frontend: Running) -> None:
    """Codex probes for it, and works without it if it gets 404."""
    answer = await frontend.http.post("/v1/responses/compact", json={"model": "tiny", "input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
    assert "/v1/responses/compact" not in (await frontend.http.get("/openapi.json")).json()["paths"]


async def test_a_last_response_has_retry_after_only_if_it_helps() -> None:
    assert b"\r\nretry-after: 1\r\n" in TOO_MANY
    for words in (CUT_SHORT, NO_TUNNELS, LARGE_HEADERS, TOO_SLOW):
        assert b"retry-after" not in words
        assert words.endswith(b"connection: close\r\n\r\n")


async def test_pages_refuse_to_be_framed(frontend: Running) -> None:
    for path in ("/", "/docs", "/console/console.js", "/console/console.css"):
        answer = await frontend.http.get(path)
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
        for name in ("default-src", "frame-ancestors", "base-uri", "form-action"):
            assert policy[name] == "'none'", (path, name)
        assert "unsafe-inline" not in policy["script-src"]
        assert answer.headers["x-frame-options"] == "DENY"
    assert "'sha256-" in (await frontend.http.get("/docs")).headers["content-security-policy"]
