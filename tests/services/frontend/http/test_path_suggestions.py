"""The error about an unknown path suggests the path that was probably meant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from quire.services.frontend.http.path_suggestions import remedy, suggest_path
from tests.services.frontend.running import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(folder: Path) -> AsyncIterator[Running]:
    async with running(folder, until_health=(503,)) as started:
        yield started


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),  # a base URL with /v1 to a client that adds it
        ("POST", "/chat/completions", "/v1/chat/completions"),  # OpenHands#485, chatgpt-web#737
        ("POST", "/v1/chat/completions/chat/completions", "/v1/chat/completions"),  # MoneyPrinterTurbo#57
        ("POST", "/chat/complitions", "/v1/chat/completions"),  # dify#131
        ("GET", "/models", "/v1/models"),
        ("POST", "/openai/v1/responses", "/v1/responses"),
        ("POST", "/v1/tokenize", "/tokenize"),
        ("POST", "/v1/api/chat", "/api/chat"),
        ("POST", "/api/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/chat/completion", "/v1/chat/completions"),
        ("GET", "/v1/v1/models/tiny", "/v1/models/tiny"),
        ("POST", "/v1/messages/v1/messages", "/v1/messages"),
    ],
)
async def test_it_is_named(frontend: Running, method: str, path: str, meant: str) -> None:
    answer = await frontend.http.request(method, path, content=b"{}")
    assert answer.status_code == 404
    assert answer.text.count(f"did you mean {meant}?") == 1


@pytest.mark.parametrize("path", ["/nowhere", "/v1/nowhere", "/v2/nowhere", "/" + "v1/" * 400 + "models"])
async def test_none_is_made_up(frontend: Running, path: str) -> None:
    answer = await frontend.http.get(path)
    assert answer.status_code == 404
    assert "did you mean" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/generate_stream", "TGI's API is not offered; use /v1/completions"),
        ("GET", "/info", "use /v1/models and /version"),
        ("POST", "/v1/conversations", "previous_response_id"),
        ("GET", "/v1/conversations/conv_1/items", "previous_response_id"),
        ("POST", "/v1/moderations", "guard model"),
        ("POST", "/v1/messages/batches", "use /v1/batches"),
        ("POST", "/api/pull", "quire up MODEL"),
        ("POST", "/v1/audio/speech", "text only"),
        ("POST", "/v1/images/generations/", "text only"),
    ],
)
async def test_a_path_of_another_server_has_a_remedy(frontend: Running, method: str, path: str, words: str) -> None:
    answer = await frontend.http.request(method, path, content=b"{}")
    assert answer.status_code == 404
    assert words in answer.text
    assert "did you mean" not in answer.text


@pytest.mark.parametrize("path", ["/v1/information", "/infos", "/api/pulled", "/v1/threadsafe"])
async def test_a_path_that_only_begins_alike_has_none(path: str) -> None:
    assert remedy(path) == ""


async def test_remedies_are_of_paths_that_are_not_served(frontend: Running) -> None:
    served = (await frontend.http.get("/openapi.json")).json()["paths"]
    assert [path for path in served if remedy(path)] == []


async def test_a_404_of_a_route_gets_no_path_suggestion(frontend: Running) -> None:
    answer = await frontend.http.get("/v1/models/other")
    assert answer.status_code == 404
    assert "did you mean" not in answer.text


async def test_a_path_that_is_served_goes_before_one_that_looks_like_it() -> None:
    known = ["/v1/models", "/v1/model", "/v1/files/{id}"]
    served = ("/v1/models", "/v1/files/a")
    assert suggest_path("/models", known, lambda path: path in served) == "/v1/models"
    assert suggest_path("/x/v1/files/a", known, lambda path: path in served) == "/v1/files/a"
    assert suggest_path("/v1/filez", [*known, "/v1/files"], lambda path: path in served) == "/v1/files"
