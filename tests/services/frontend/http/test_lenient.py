"""Values of another JSON type that bodies may have, as the OpenAPI document states."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": SAID, "max_tokens": 2},
    "/api/chat": {"messages": SAID, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    folder = tool_model_folder(tmp_path_factory.mktemp("models") / "talking")
    async with scheduler(script), running(folder, script.address) as started:
        yield started


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/v1/completions", {"max_tokens": "3"}),
        ("/v1/completions", {"n": True, "temperature": "0.5"}),
        ("/v1/completions", {"priority": "0", "stream": 0}),
        ("/v1/completions", {"echo": "false", "ignore_eos": 1}),
        ("/v1/chat/completions", {"stream": "false", "seed": "7"}),
        ("/v1/responses", {"stream": 0, "temperature": "1"}),
        ("/v1/messages", {"stream": "0", "max_tokens": "2"}),
        ("/api/chat", {"stream": 0}),
        ("/api/generate", {"raw": 0}),
    ],
)
async def test_numbers_and_booleans_may_stand_in_bodies_as_text(
    frontend: Running, path: str, changes: dict[str, Any]
) -> None:
    answer = await frontend.http.post(path, json={"model": "talking", **BODIES[path], **changes})
    assert answer.status_code == 200, answer.text
    document = (await frontend.http.get("/openapi.json")).json()
    assert "Numbers and booleans may be sent as strings" in document["info"]["description"]


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/v1/completions", {"max_tokens": "three"}),
        ("/v1/completions", {"stream": 2}),
        ("/v1/completions", {"prompt": [1, "2"]}),
        ("/v1/completions", {"model": 5}),
        ("/v1/chat/completions", {"stream": "maybe"}),
        ("/api/generate", {"raw": "x"}),
    ],
)
async def test_what_is_neither_is_refused_by_name(frontend: Running, path: str, changes: dict[str, Any]) -> None:
    answer = await frontend.http.post(path, json={"model": "talking", **BODIES[path], **changes})
    [field] = changes
    assert (answer.status_code, field in answer.text) == (400, True)
