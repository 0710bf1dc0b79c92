"""Tests that aliases of the model are accepted at every edge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = ["tiny", "gpt-4o", "team/chat"]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(folder: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, served_model_aliases=tuple(NAMES[1:])) as started:
        yield started


async def test_all_model_lists_contain_the_aliases(frontend: Running) -> None:
    listed = await frontend.http.get("/v1/models")
    assert [entry["id"] for entry in listed.json()["data"]] == NAMES
    tags = await frontend.http.get("/api/tags")
    assert [entry["name"].removesuffix(":latest") for entry in tags.json()["models"]] == NAMES
    one = await frontend.http.get("/v1/models/team/chat")
    assert one.status_code == 200


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "x"}),
        ("/api/generate", {"prompt": "x", "stream": False, "options": {"num_predict": 1}}),
        ("/api/show", {}),
    ],
)
async def test_requests_may_use_aliases_and_answers_have_the_first(
    frontend: Running, path: str, body: dict[str, object], name: str
) -> None:
    answer = await frontend.http.post(path, json={"model": name, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "tiny") == "tiny"


async def test_they_are_paths_of_the_open_inference_protocol(frontend: Running) -> None:
    for name in NAMES:
        assert (await frontend.http.get(f"/v2/models/{name}/ready")).status_code == 200


async def test_unknown_names_are_refused_with_the_served_names(frontend: Running) -> None:
    answer = await frontend.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert answer.status_code == 404
    assert "available: tiny, gpt-4o, team/chat." in answer.text
